"""Find pages of the documentation that scroll sideways, in headless Chromium.

    sphinx-build docs build/docs && python -m tests.widths build/docs

Not among the tests: Chromium is large. Debian has it as the package ``chromium``.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTHS = 1200, 400
"""Pixels of the windows that pages are looked at in."""

SCRIPT = """
const found = [];
let left = frames.length;
for (const [page, width] of pages) {
  const frame = document.createElement("iframe");
  frame.style.width = width + "px";
  frame.style.height = "900px";
  frame.style.border = "0";
  frame.onload = () => {
    const root = frame.contentDocument.documentElement;
    found.push([page, width, root.scrollWidth]);
    if (found.length === pages.length) {
      const said = document.createElement("pre");
      said.id = "found";
      said.textContent = JSON.stringify(found);
      document.body.append(said);
    }
  };
  frame.src = page;
  document.body.append(frame);
}
"""


def measure(pages: list[Path]) -> list[tuple[str, int, int]]:
    """Load pages and measure how wide their content is.

    Args:
        pages: HTML files.

    Returns:
        For each page and width of the window, in pixels, the width of its content.

    Raises:
        CalledProcessError: Chromium failed.
    """
    wanted = [(page.absolute().as_uri(), width) for page in pages for width in WIDTHS]
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "frames.html")
        file.write_text(f"<body><script>const pages = {json.dumps(wanted)};{SCRIPT}</script>")
        command = [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu"),
            *("--allow-file-access-from-files", f"--user-data-dir={place}/profile"),
            *("--virtual-time-budget=120000", "--dump-dom", file.as_uri()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    if found is None:
        raise RuntimeError("Chromium did not load all pages")
    return [tuple(each) for each in json.loads(html.unescape(found[1]))]


def main() -> int:
    """Print pages that are wider than their window; 1 if there are any."""
    pages = sorted(Path(sys.argv[1]).rglob("*.html"))
    measured = measure(pages)
    wide = [(page, width, content) for page, width, content in measured if content > width]
    for page, width, content in wide:
        print(f"{page}: {content} pixels in a window of {width}")
    print(f"{len(measured)} looked at, {len(wide)} scroll sideways")
    return bool(wide)


if __name__ == "__main__":
    sys.exit(main())
