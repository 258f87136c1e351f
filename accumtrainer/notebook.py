"""HTML of results and of progress, as notebooks show it."""

import html
from collections.abc import Sequence
from typing import Any

MOST_ROWS = 30

TEXT = "font-family:monospace;font-size:90%;white-space:pre-wrap"
CELL = "text-align:{side};font-family:monospace;white-space:pre"
LINE = "font-family:monospace;font-size:90%;display:flex;gap:1ch"
HEADING = "white-space:nowrap"
BAR = "width:12em;flex-shrink:0"


def paragraph(text: Any) -> str:
    """Write text as HTML that keeps its lines.

    Examples:
        >>> print(paragraph("loss < 1"))
        <div style="...">loss &lt; 1</div>
    """
    return f'<div style="{TEXT}">{html.escape(str(text))}</div>'


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Any]],
    most_rows: int = MOST_ROWS,
) -> str:
    """Write a table as HTML; numbers stand to the right.

    Args:
        headings: one for each column.
        rows: what stands in the cells, as text or as numbers.
        most_rows: how many are shown. Of more, those in the middle are left
            out, and a row says how many.

    Examples:
        >>> "<td" in table(["path", "error"], [["dense/kernel", 1e-8]])
        True
    """
    shown = [_row("td", row) for row in rows]
    if len(rows) > most_rows:
        first = most_rows // 4
        left_out = len(rows) - most_rows
        words = html.escape(f"… {left_out:,} more …")
        shown[first : first + left_out] = [
            f'<tr><td colspan="{len(headings)}" '
            f'style="text-align:center">{words}</td></tr>'
        ]
    head = f"<thead>{_row('th', headings)}</thead>"
    return f"<table>{head}<tbody>{''.join(shown)}</tbody></table>"


def bar(heading: str, finished: int, total: int | None, body: str) -> str:
    """Write a line of progress as HTML, with a bar between its texts.

    Args:
        finished: number of units finished.
        total: number of units expected; `None` makes a bar that only moves.
    """
    is_known = total is not None and 0 < total >= finished
    value = f' value="{finished}" max="{total}"' if is_known else ""
    return (
        f'<div style="{LINE}"><span style="{HEADING}">{html.escape(heading)}'
        f'</span><progress style="{BAR}"{value}></progress>'
        f"<span>{html.escape(body)}</span></div>"
    )


def _row(tag: str, cells: Sequence[Any]) -> str:
    return f"<tr>{''.join(_cell(tag, cell) for cell in cells)}</tr>"


def _cell(tag: str, content: Any) -> str:
    is_number = isinstance(content, int | float)
    style = CELL.format(side="right" if is_number else "left")
    text = f"{content:.4g}" if isinstance(content, float) else str(content)
    return f'<{tag} style="{style}">{html.escape(text)}</{tag}>'
