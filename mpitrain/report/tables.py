"""Tables of the page."""

from collections.abc import Mapping, Sequence
from html import escape


def column_table(names: Sequence[str], rows: Mapping[str, Sequence[str]], corner: str) -> str:
    """Lay out a column a name, and a row a label."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{escape(label)}</th>' + "".join(f"<td>{escape(text)}</td>" for text in texts) + "</tr>"
        for label, texts in rows.items()
    )
    return (
        f'<div class="wide"><table><thead><tr><th scope="col">{escape(corner)}</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
