"""Draw the pictures of the documentation: ``python docs/pictures/draw.py``.

Every picture is a list of boxes, lines of text and arrows, written below; charts show columns of
tables of the pages. The SVG files beside this one are made from it and are part of the repository,
so that pages need no other program; a test compares them.
"""

from __future__ import annotations

import html
from pathlib import Path

HERE = Path(__file__).parent

INK, FAINT = "#1f2933", "#52606d"
PAPER = "#ffffff"
FILLS = {
    "machine": "#eef2f7",
    "process": "#ffffff",
    "memory": "#e3f4e8",
    "disk": "#fdf3d8",
    "reader": "#e4effc",
    "ours": "#2f7d4f",
    "others": "#9aa7b5",
}
LINE = 19
"""Pixels from one line of text to the next."""


class Picture:
    """A drawing of a given size, in pixels, on a light ground of its own.

    Args:
        width: of the picture.
        height: of the picture.
        title: what it shows, for readers who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img" font-size="14"'
            ' font-family="system-ui, Helvetica, Arial, DejaVu Sans, sans-serif">',
            f"<title>{html.escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8"'
            ' markerHeight="8" orient="auto-start-reverse">'
            f'<path d="M0 0 8 4 0 8Z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        ]

    def box(self, x: int, y: int, w: int, h: int, kind: str, title: str, *lines: str) -> None:
        """Draw a box with a title and lines of smaller text; a gap between lines for an empty one.

        Args:
            x: left edge.
            y: upper edge.
            w: width.
            h: height.
            kind: key of ``FILLS``.
            title: first line, bold.
            lines: those below it.
        """
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{FILLS[kind]}"'
            f' stroke="{FAINT}"/>'
        )
        self.text(x + 10, y + 20, title, bold=True)
        for number, line in enumerate(lines, 1):
            self.text(x + 10, y + 20 + number * LINE, line)

    def text(self, x: int, y: int, text: str, *, bold: bool = False, faint: bool = False) -> None:
        """Write a line that begins at a point."""
        weight = ' font-weight="600"' if bold else ""
        fill = FAINT if faint else INK
        self._parts.append(
            f'<text x="{x}" y="{y}"{weight} fill="{fill}">{html.escape(text)}</text>'
        )

    def arrow(self, *points: tuple[int, int], both: bool = False, dashed: bool = False) -> None:
        """Draw an arrow along points; with ``both`` it has a head at each end."""
        path = " ".join(f"{x},{y}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5"'
            f'{start}{dash} marker-end="url(#head)"/>'
        )

    def bar(self, x: int, y: int, w: int, kind: str) -> None:
        """Draw a bar of a chart, as high as a line of text."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{LINE}" rx="2" fill="{FILLS[kind]}"/>'
        )

    def svg(self) -> str:
        """Return the text of the file."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def overview() -> Picture:
    """Draw what the project does: for the first page."""
    p = Picture(720, 400, "One directory on your machine appears on every host of a cluster")
    p.box(20, 20, 680, 106, "machine", "Your machine: a login node, a laptop, a CI job")
    p.box(40, 52, 200, 60, "disk", "A directory", "wheels, a venv, a model")
    p.box(300, 52, 380, 60, "process", "wheelmount", "resolves, downloads, checks, sends")
    p.arrow((240, 82), (300, 82))
    for number, x in enumerate((20, 255, 490)):
        p.box(x, 176, 210, 204, "machine", f"Host {number}")
        p.box(x + 15, 208, 180, 60, "memory", "Its memory", "the same directory")
        p.box(
            x + 15, 300, 180, 66, "reader", "python, pip, uv", "on the host, or in a", "container"
        )
        p.arrow((x + 120, 268), (x + 120, 300))
    p.text(385, 289, "read-only", faint=True)
    for x in (125, 360, 595):
        p.arrow((x, 126), (x, 176))
    p.text(370, 156, "TLS or RDMA, hashes checked", faint=True)
    p.text(135, 156, "each byte once", faint=True)
    p.arrow((270, 238), (215, 238), both=True)
    p.arrow((450, 238), (505, 238), both=True)
    return p


def architecture() -> Picture:
    """Draw processes, the rooms that they run, and the way of a byte."""
    p = Picture(720, 858, "Processes, rooms, and the way of a byte from the source to a reader")
    p.box(20, 20, 680, 250, "machine", "The client's machine")
    p.box(40, 52, 160, 78, "disk", "Source directory", "or the wheelhouse", "(wheels/)")
    p.box(
        *(260, 52, 420, 200, "process", "The command: cli/ → operations/"),
        "mount/snapshot: scan the tree, divide it into blocks",
        "mount/client: mount on each host, deliver",
        "mount/transfer: ring of blocks in memory",
        "",
        "① copy: file → block in the ring",
        "# hash: blake3 of the block, the one that counts",
        "   (zstd, if the link is slow and processors idle)",
        "② copy: block → socket",
    )
    p.arrow((200, 91), (260, 91))
    p.text(206, 84, "read", faint=True)
    p.box(20, 330, 680, 508, "machine", "Each host")
    p.box(
        *(40, 362, 400, 200, "process", "Agent (a Monarch process): mount/host"),
        "mount/transfer: fetch from the hosts above",
        "",
        "③ copy: socket → memory of this block alone",
        "   (unpacked, if it came compressed)",
        "# hash: compared with the client's",
        "④ copy: block → files of the store",
        "# hash: each small file, for verify",
        "then lent to the hosts below from the same memory",
    )
    p.arrow((330, 252), (330, 362))
    p.text(342, 300, "blocks: each leaves the client once", faint=True)
    p.box(490, 400, 190, 60, "machine", "Other hosts", "each feeds up to four")
    p.arrow((440, 430), (490, 430), both=True)
    p.box(
        40,
        612,
        230,
        78,
        "memory",
        "Store: mount/store",
        "files in memory (tmpfs),",
        "a description of the tree",
    )
    p.arrow((150, 562), (150, 612))
    p.text(160, 592, "checked bytes only", faint=True)
    p.box(
        *(320, 612, 360, 78, "process", "Serving process: mount/serve"),
        "answers the kernel (FUSE), outlives the command,",
        "asks the agent for blocks that a read needs",
    )
    p.arrow((320, 651), (270, 651))
    p.arrow((560, 612), (560, 500), (440, 500), dashed=True)
    p.text(570, 545, "goes ahead", faint=True)
    p.box(
        *(
            40,
            740,
            640,
            78,
            "reader",
            "Readers: scripts, pip, uv, containers (hosts/commands, containers/)",
        ),
        "All bytes here, bind mount: ⑤ copy: store → reader (none where it is mapped)",
        "FUSE: ⑤ store → server, ⑥ server → page cache, ⑦ page cache → reader",
    )
    p.arrow((150, 690), (150, 740))
    p.text(160, 720, "bind", faint=True)
    p.arrow((500, 690), (500, 740))
    p.text(510, 720, "FUSE", faint=True)
    return p


def _column(page: str, header: str, column: str) -> dict[str, str]:
    """Return the cells of a column in a table of a page, by the first cell of each row."""
    lines = (HERE.parent / page).read_text().splitlines()
    first = lines.index(header)
    place = _cells(header).index(column)
    found = {}
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        cells = _cells(line)
        found[cells[0]] = cells[place]
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]


def chart(title: str, values: dict[str, str]) -> Picture:
    """Draw a bar for each value, with its name and number."""
    p = Picture(720, 52 + 30 * len(values), title)
    p.text(20, 30, title, bold=True)
    most = max(map(float, values.values()))
    for number, (name, value) in enumerate(values.items()):
        y = 46 + 30 * number
        p.text(20, y + 14, name)
        width = max(2, round(350 * float(value) / most))
        p.bar(310, y, width, "ours" if name.startswith("wheelmount") else "others")
        p.text(318 + width, y + 14, value)
    return p


def delivery() -> Picture:
    """Draw how long a file takes to all hosts, by each way that was measured."""
    header = "| | seconds | leaves the client, × size |"  # noqa: RUF001
    values = _column("compared.md", header, "seconds")
    return chart("Seconds to deliver 1 GiB to four hosts, links of 1 Gbit/s", values)


def first_import() -> Picture:
    """Draw when a first import of torch ends, after the start of the command."""
    header = "| | mounted | first `ls` | last page of the big file | import | everything |"
    values = _column("benchmarks.md", header, "import")
    return chart("Seconds until import torch has ended, while 1 GiB and torch arrive", values)


def reads() -> Picture:
    """Draw the speed of an import from a mount, relative to tmpfs."""
    values = _column("compared.md", "| | small files | `import torch` |", "import torch")
    return chart("Speed of import torch from a complete mount; tmpfs is 1", values)


PICTURES = {
    "overview.svg": overview,
    "architecture.svg": architecture,
    "delivery.svg": delivery,
    "first_import.svg": first_import,
    "reads.svg": reads,
}


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw().svg())


if __name__ == "__main__":
    main()
