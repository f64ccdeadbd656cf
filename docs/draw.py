"""Drawings of the docs: ``python docs/draw.py`` writes docs/img/method.svg and way_of_gy.svg.

Boxes have their own background, and text outside of them is grey: a drawing is legible on a light
and on a dark page.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent / "img"
FLOAT, INTEGER, PRODUCT, RESULT = "#dbe5f1", "#f8d7c4", "#d6ead2", "#e8ddf2"
INK, LINE = "#1c1c1c", "#7a7a7a"  # in boxes; between them
LEADING = 16


class Drawing:
    """Boxes with lines of text, arrows between their edges, and captions."""

    def __init__(self, width: int, height: int, title: str, font: float = 12.5) -> None:
        self.size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        self.title = title
        self.font = font
        self.parts: list[str] = []

    def box(self, x: int, y: int, width: int, lines: Sequence[str], fill: str) -> Box:
        height = LEADING * len(lines) + 14
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" '
            f'stroke="{LINE}"/>'
        )
        for i, text in enumerate(lines):
            weight = ' font-weight="bold"' if i == 0 else ""
            self.parts.append(
                f'<text x="{x + width / 2:g}" y="{y + 20 + i * LEADING}" fill="{INK}" '
                f'text-anchor="middle"{weight}>{escape(text)}</text>'
            )
        return Box(x, y, width, height)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
        """Draw a straight line, or a step half way if the heights differ."""
        (x0, y0), (x1, y1) = start, end
        middle = (x0 + x1) / 2
        path = f"M{x0:g},{y0:g} H{middle:g} V{y1:g} H{x1:g}"
        if x0 == x1:
            path = f"M{x0:g},{y0:g} V{y1:g}"
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.4" '
            'marker-end="url(#head)"/>'
        )
        if text:
            self.caption(middle + 4, min(y0, y1) - 5, text, "middle")

    def caption(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{LINE}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self) -> str:
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {self.size} role="img" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="{self.font:g}">\n'
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>\n'
            f"{body}\n</svg>\n"
        )


class Box:
    """Ends of a box's arrows."""

    def __init__(self, x: int, y: int, width: int, height: int) -> None:
        self.x, self.y, self.width, self.height = x, y, width, height

    def left(self, share: float = 0.5) -> tuple[float, float]:
        return self.x, self.y + share * self.height

    def right(self, share: float = 0.5) -> tuple[float, float]:
        return self.x + self.width, self.y + share * self.height

    def bottom(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height

    def top(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y


def method() -> Drawing:
    """Forward and backward of one layer, legible on a phone."""
    draw = Drawing(480, 400, "HOT: plain forward, integer backward", font=14)
    draw.caption(8, 18, "Forward: x is kept in 4 bits")
    x = draw.box(8, 30, 104, ["x", "bf16"], FLOAT)
    y = draw.box(348, 30, 124, ["y = x wᵀ", "bf16 or INT8"], FLOAT)
    codes = draw.box(150, 84, 160, ["codes of x", "INT4"], INTEGER)
    draw.arrow(x.right(0.3), y.left(0.3))
    draw.arrow(x.right(0.8), codes.left())
    draw.parts.append(f'<path d="M8,146 H472" stroke="{LINE}" stroke-dasharray="5 5"/>')
    draw.caption(8, 170, "Backward: two INT8 products")
    w = draw.box(8, 184, 104, ["w", "bf16"], FLOAT)
    gy = draw.box(8, 270, 104, ["g_y", "bf16"], FLOAT)
    w8 = draw.box(150, 184, 160, ["w, transformed", "INT8"], INTEGER)
    rows = draw.box(150, 238, 160, ["g_y, transformed", "INT8, scale a token"], INTEGER)
    columns = draw.box(150, 292, 160, ["g_y", "INT8, scale a channel"], INTEGER)
    x8 = draw.box(150, 346, 160, ["x", "INT8, from its codes"], INTEGER)
    gx = draw.box(348, 211, 124, ["g_x = g_y w", "INT8 product"], PRODUCT)
    gw = draw.box(348, 319, 124, ["g_w = g_yᵀ x", "INT8 product"], PRODUCT)
    draw.arrow(w.right(), w8.left())
    draw.arrow(gy.right(0.35), rows.left())
    draw.arrow(gy.right(0.7), columns.left())
    for codes_of, result, place in ((w8, gx, 0.3), (rows, gx, 0.7), (columns, gw, 0.3)):
        draw.arrow(codes_of.right(), result.left(place))
    draw.arrow(x8.right(), gw.left(0.7))
    return draw


def way_of_gy() -> Drawing:
    """Passes that turn g_y into the operands of both products."""
    draw = Drawing(900, 330, "The way of g_y through the CUDA backend")
    gy = draw.box(10, 130, 110, ["g_y", "[L, O] 16-bit"], FLOAT)
    small = draw.box(200, 20, 270, ["small layer", "one launch quantises g_y, w and x"], INTEGER)
    rows = draw.box(200, 84, 270, ["rows", "a warp or bulk copies for each row"], INTEGER)
    both = draw.box(200, 148, 270, ["both, many tokens", "rows' codes, columns' maxima"], INTEGER)
    cluster = draw.box(200, 212, 270, ["columns, one pass", "a cluster holds all tokens"], INTEGER)
    second = draw.box(200, 276, 270, ["columns, second pass", "codes, backwards in L2"], INTEGER)
    for index, box in enumerate((small, rows, both, cluster, second)):
        draw.arrow(gy.right(0.2 + 0.15 * index), box.left())
    a_gx = draw.box(560, 84, 150, ["codes [L, O]", "a scale for each row"], FLOAT)
    a_gw = draw.box(560, 212, 150, ["codes [O, K]", "a scale for each row"], FLOAT)
    gb = draw.box(760, 276, 130, ["g_b", "sums of columns"], RESULT)
    gx = draw.box(760, 84, 130, ["product", "with w → g_x"], PRODUCT)
    gw = draw.box(760, 212, 130, ["product", "with x → g_w"], PRODUCT)
    draw.arrow(small.right(0.3), a_gx.left(0.25))
    draw.arrow(rows.right(), a_gx.left(0.5))
    draw.arrow(both.right(0.3), a_gx.left(0.75))
    draw.arrow(cluster.right(0.4), a_gw.left(0.4))
    draw.arrow(second.right(0.4), a_gw.left(0.8))
    draw.arrow(a_gx.right(), gx.left())
    draw.arrow(a_gw.right(), gw.left())
    draw.arrow(second.right(0.8), gb.left(0.8))
    draw.parts.append(
        f'<path d="M470,188 H492 V288 H474" fill="none" stroke="{LINE}" stroke-width="1.4" '
        'marker-end="url(#head)"/>'
    )
    draw.caption(560, 36, "a small layer's launch also makes the codes of the columns and g_b")
    return draw


DRAWINGS = {"method.svg": method, "way_of_gy.svg": way_of_gy}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=IMAGES)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, make in DRAWINGS.items():
        (args.out / name).write_text(make().svg(), encoding="utf-8")
        print(f"written: {args.out / name}")


if __name__ == "__main__":
    main()
