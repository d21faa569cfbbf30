# Starts Python on a host, by the client's path or else of the bundle: see bundle.py.
#
# It is given to sh as one line, in the quotes of whatever login shell the host has. So it has no
# single quote, backslash or exclamation mark, no comment behind a command, and ends lines with ;
# where there may be more. What it says are lines as of launcher.say.
how=$1; token=$2; python=$3; key=$4; machine=$5; cache=$6; lacks=$7; error=$8; shift 8;
# Whether only this user and root can have placed the client's Python, and all that its links lead
# to. Where others may add files, as in /tmp, what counts lies two directories below at least: Python
# reads its configuration and its modules in the directory above its own, too.
sound() {
  me=$(id -un) private=; case $(getent group "$(id -g)") in "$me":*: | "$me":*:"$me") private=$me;; esac;
  { namei -mo "$python" && echo end; } | {
    near=0;
    while read -r mode owner group name; do
      case $mode in f:) continue;; end) exit 0;; esac;
      case $owner in root | "$me") :;; *) exit 1;; esac;
      open=;
      case $mode in
        l*) :;;
        ????????w?) open=open;;
        ?????w????) case $group in root | "$private") :;; *) open=open;; esac;;
      esac;
      case $mode$open in
        d????????[tT]open) near=2;;
        *open) exit 1;;
        d*) [ $near = 0 ] || near=$((near - 1));;
        *) [ $near = 0 ] || exit 1;;
      esac;
    done;
    exit 1;
  };
};
if [ -x "$python" ] && sound 2> /dev/null; then exec "$python" "$@"; fi;
mask=$(umask); umask 077;
node=${SLURMD_NODENAME:-$(uname -n)};
fail() {
  words=$(echo "$*" | tr -cd "[:alnum:] ./:_=,()-");
  echo "$token $(printf "$error" "$node" "$words")"; exit 1;
};
tidy() { rm -rf "$new"; };
cache=${cache:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/wheelmount}/bundles;
said=$(mkdir -p "$cache" 2>&1) || fail "$said";
here=$(cd -P "$cache" && pwd -P) || fail "$cache cannot be entered";
case $(ls -ld "$here") in drwx------*) own=yes;; *) own=;; esac;
if [ -z "$own" ] || [ -h "$cache" ] || [ "$(stat -c %u "$here")" -ne "$(id -u)" ];
then fail "$cache is no private directory of this user"; fi;
start="$here/$key/venv/bin/python";
if [ -x "$start" ]; then :; else
  [ "$(uname -m)" = "$machine" ] ||
    fail "it has no wheelmount, and is $(uname -m), where this client is $machine";
  for tool in gzip head mkfifo sha256sum tar tee; do
    command -v $tool > /dev/null || fail "it has no wheelmount, and no $tool to unpack one";
  done;
  echo "$token $(printf "$lacks" "$node")";
  if [ $how = told ]; then
    left() { for _ in 1 2 3 4 5; do rm -f "/tmp/wheelmount-$token.tar.gz"; sleep 1; done; }; trap left EXIT; trap "exit 1" HUP INT TERM;
    read -r line || exit 1; trap - EXIT HUP INT TERM;
  fi;
  if [ $how != take ]; then
    left=600; until [ -x "$start" ] || [ $left = 0 ]; do sleep 1; left=$((left - 1)); done;
  else
    read -r size sum glibc path || exit 1;
    has=$(getconf GNU_LIBC_VERSION 2> /dev/null) || has=;
    minor=${has#glibc 2.};
    case $has in "glibc 2."*) [ "${minor%%.*}" -ge "$glibc" ] ||
      fail "it has no wheelmount, and $has, where this client needs 2.$glibc";; esac;
# Moved before they are removed: a part of one that is left would be taken for all of it.
    {
      find "$here" -mindepth 1 -maxdepth 1 "(" -mtime +60 -o -name "new-*" -mtime +0 ")" |
        while read -r old; do gone=$here/new-${old##*/}; mv -T "$old" "$gone"; rm -rf "$gone"; done;
    } 2> /dev/null;
    new=$here/new-$token-$node-$$; trap tidy EXIT; trap "exit 1" HUP INT TERM;
    said=$(mkdir "$new" 2>&1 && mkfifo "$new/copy" 2>&1) || fail "$said";
    said=$(
      sha256sum < "$new/copy" &
      if [ -z "$path" ]; then head -c "$size"; else cat "$path"; fi | tee "$new/copy" | {
        tar -xzf - -C "$new" 2>&1 && echo "$token all";
        cat > /dev/null;
      };
      wait;
    );
    case $said in *"$sum"*) :;; *) fail "not all came, or not what was sent";; esac;
    case $said in *"$token all"*) :;; *) fail "$here: ${said%%"$sum"*}${said##*"$sum  -"}";; esac;
    rm "$new/copy";
    echo "home = $new/python/bin" > "$new/venv/pyvenv.cfg" || fail "$here cannot be written to";
    said=$("$new/venv/bin/python" -c "import psutil, ssl, monarch._rust_bindings" 2>&1) ||
      fail "programs of this client cannot be run in $here: $said";
    echo "home = $here/$key/python/bin" > "$new/venv/pyvenv.cfg";
    mv -T "$new" "$here/$key" 2> /dev/null; tidy; trap - EXIT HUP INT TERM;
  fi;
fi;
[ -x "$start" ] || fail "$start does not come";
touch "$here/$key";
umask "$mask";
exec "$start" "$@"
