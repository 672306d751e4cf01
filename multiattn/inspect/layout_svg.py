"""A picture of a tile's banks: a grid of chunks as plain SVG, written by hand."""

from __future__ import annotations

from xml.sax.saxutils import escape

from multiattn.inspect.layout import ACCESSES, BANK_GROUPS, PERIOD, SharedTile, banks_of_group, key_formula, traffic

FILLS = ("#f4a6a6", "#f7c99a", "#f5e79a", "#bfe3a0", "#9fdcc8", "#a3cdf0", "#c3b4ee", "#eeb2dc")
"""Colours of the bank groups: pale, so that dark ink reads on each. The page has a ground of its own, for dark mode."""
INK = "#1a1a1a"
GROUND = "#ffffff"
SHOWN_ROWS = 16

_CELL_WIDTH, _CELL_HEIGHT = 52, 22
_LEFT, _TOP, _MARGIN = 64, 84, 16
_LEGEND_HEIGHT = 60


def draw(tile: SharedTile) -> str:
    """SVG of the first 16 rows: a cell per chunk, coloured by bank group; the rows of one ldmatrix are outlined."""
    rows = min(tile.rows, SHOWN_ROWS)
    grid_width, grid_height = tile.chunks * _CELL_WIDTH, rows * _CELL_HEIGHT
    width = max(_LEFT + grid_width + _MARGIN, _LEFT + BANK_GROUPS * _CELL_WIDTH + _MARGIN)
    height = _TOP + grid_height + _LEGEND_HEIGHT + _MARGIN
    reads = traffic(tile, ACCESSES["q"])
    needed = reads.wavefronts // reads.requests
    count = "1 wavefront" if needed == 1 else f"{needed} wavefronts"
    title = f"{tile.rows}x{tile.columns}, key(row) = {key_formula(tile)}: banks of each chunk"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{GROUND}"/>',
        _text(_MARGIN, 24, title, anchor="start", weight="bold"),
        _text(_MARGIN, 44, f"outlined: one 8x8 matrix of ldmatrix, {count}", anchor="start"),
    ]
    parts += [_text(_x(chunk) + _CELL_WIDTH / 2, _TOP - 8, str(chunk)) for chunk in range(tile.chunks)]
    parts.append(_text(_LEFT - 8, _TOP - 8, "chunk", anchor="end"))
    for row in range(rows):
        parts.append(_text(_LEFT - 8, _y(row) + 15, f"row {row}", anchor="end"))
        parts += [_cell(_x(chunk), _y(row), tile.bank_group(row, chunk)) for chunk in range(tile.chunks)]
    parts.append(
        f'<rect x="{_x(0)}" y="{_y(0)}" width="{_CELL_WIDTH}" height="{8 * _CELL_HEIGHT}" fill="none" '
        f'stroke="{INK}" stroke-width="4"/>'
    )
    legend = _TOP + grid_height + 22
    parts.append(_text(_LEFT - 8, legend + 15, "group", anchor="end"))
    for group in range(BANK_GROUPS):
        parts.append(_cell(_x(group), legend, group, label=str(group)))
    note = f"a label: the banks that a chunk fills; every {PERIOD} rows are alike"
    parts.append(_text(_MARGIN, legend + 44, note, anchor="start"))
    return "\n".join([*parts, "</svg>", ""])


def _x(chunk: int) -> int:
    return _LEFT + chunk * _CELL_WIDTH


def _y(row: int) -> int:
    return _TOP + row * _CELL_HEIGHT


def _cell(x: int, y: int, group: int, *, label: str | None = None) -> str:
    box = (
        f'<rect x="{x}" y="{y}" width="{_CELL_WIDTH}" height="{_CELL_HEIGHT}" fill="{FILLS[group]}" '
        f'stroke="{INK}" stroke-width="0.5"/>'
    )
    return box + _text(x + _CELL_WIDTH / 2, y + 15, label or banks_of_group(group))


def _text(x: float, y: float, text: str, *, anchor: str = "middle", weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
