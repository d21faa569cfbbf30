-- A module file for Lmod: wheelmount as examples/setup.sh has made it in this checkout.
--
--   module use CHECKOUT/examples/modulefiles
--   module load wheelmount
--
-- Copied to where a site has its module files it needs the path of the checkout: set root.
local root = myFileName():match("^(.*)/examples/modulefiles/") or "/opt/wheelmount"

help([[wheelmount mounts a directory of this machine, such as wheels or a virtual environment, on
every host of a job, and runs, installs and starts containers there without network.

  wheelmount run --hosts slurm:4 VENV script.sh
  man wheelmount]])
whatis("Name: wheelmount")
whatis("Description: package cache and container launcher for clusters")
whatis("Keywords: wheels, pip, uv, apptainer, FUSE, RDMA")

-- At the end: the python and uv beside it are nobody else's business. man finds its pages by this.
append_path("PATH", pathJoin(root, ".venv", "bin"))
