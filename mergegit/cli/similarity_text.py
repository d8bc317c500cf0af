"""The likeness of experts as people and programs are shown it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import click

from mergegit.cli.figure_text import cosine_text, figure_json, figure_text
from mergegit.cli.heat_map import Scale
from mergegit.cli.matrix_text import matrix_lines
from mergegit.cli.plan_text import print_table
from mergegit.cli.text import plural, printable
from mergegit.repository.figures import Figure
from mergegit.repository.similarity_report import Matrix, Overlap, SimilarityReport

_NAMED: Final = 5


def print_similarity(report: SimilarityReport) -> None:
    """A line for each expert, then a matrix for each thing that was asked."""
    count = len(report.experts)
    click.echo(
        f"{plural(count, 'expert')} on base {printable(report.base.name)}, "
        f"{plural(report.tensors, 'tensor')}, {report.elements:,} elements, "
        f"{'read' if report.exact else 'from statistics'}"
    )
    labels = [printable(expert.name) for expert in report.experts]
    rows = [
        [
            label,
            figure_text(report.norms[place], with_error=True),
            _overlap_text(report.overlaps[place][place]),
        ]
        for place, label in enumerate(labels)
    ]
    print_table(["expert", "relative norm", "elements changed"], rows)
    scale = Scale.shares()
    parts = (
        ("cosines", report.cosines, cosine_text),
        ("signs that agree, of the elements that both changed", report.agreements, _share_text),
    )
    for title, matrix, text in parts:
        click.echo(f"{title}{_error_note(matrix)}:")
        for line in matrix_lines(
            labels,
            lambda i, j, matrix=matrix, text=text: text(matrix[i][j]),  # type: ignore[misc]
            lambda i, j, matrix=matrix: _value(matrix[i][j]),  # type: ignore[misc]
            scale,
        ):
            click.echo(line)
    click.echo("elements that both changed, of all:")
    overlaps = report.overlaps
    for line in matrix_lines(
        labels,
        lambda i, j: _overlap_text(overlaps[i][j]),
        lambda i, j: _share(overlaps[i][j]),
        scale,
    ):
        click.echo(line)
    _print_notes(report)


def _print_notes(report: SimilarityReport) -> None:
    doubtful = [one for row in report.overlaps for one in row if one and not one.is_exact]
    if doubtful:
        widest = max(one.high - one.low for one in doubtful)
        click.echo(
            "  ~: signs as those of normal changes with these cosines; elements as if experts "
            f"chose them independently, off by {100 * widest:.1f} points at most"
        )
    cells = [*_off_diagonal(report.cosines), *report.norms]
    if any(cell is None for cell in cells) or any(
        one is None for row in report.overlaps for one in row
    ):
        click.echo(
            "  ?: statistics do not tell; --exact reads the blocks"
            if not report.exact
            else "  ?: nothing was changed"
        )
    for name, why in list(report.left_out.items())[:_NAMED]:
        click.echo(f"  tensor {printable(name)} is left out: {printable(why)}")
    if len(report.left_out) > _NAMED:
        click.echo(f"  ... and {len(report.left_out) - _NAMED} more tensors; see --json")


def _off_diagonal(matrix: Matrix) -> Iterable[Figure | None]:
    return (cell for i, row in enumerate(matrix) for j, cell in enumerate(row) if i != j)


def _error_note(matrix: Matrix) -> str:
    """The largest standard error of a matrix, where it has any."""
    errors = [cell.error for row in matrix for cell in row if cell is not None]
    largest = max((error for error in errors if error is not None), default=None)
    return "" if largest is None else f" (standard error at most {largest:.1g})"


def _share_text(figure: Figure | None) -> str:
    if figure is None:
        return "?"
    return f"{'' if figure.error is None else '~'}{100 * figure.value:.0f}%"


def _overlap_text(overlap: Overlap | None) -> str:
    if overlap is None:
        return "?"
    return f"{'' if overlap.is_exact else '~'}{100 * overlap.share:.1f}%"


def _value(figure: Figure | None) -> float | None:
    return None if figure is None else figure.value


def _share(overlap: Overlap | None) -> float | None:
    return None if overlap is None else overlap.share


def similarity_json(report: SimilarityReport) -> dict[str, Any]:
    """The stable keys of a similarity."""
    count = len(report.experts)
    return {
        "base": {"ref": report.base.name, "commit": report.base.commit.hex()},
        "exact": report.exact,
        "read_bytes": report.read_bytes,
        "tensors": report.tensors,
        "elements": report.elements,
        "experts": [
            {
                "ref": expert.name,
                "commit": expert.commit.hex(),
                **figure_json("relative", report.norms[place]),
                "changed": _share(report.overlaps[place][place]),
            }
            for place, expert in enumerate(report.experts)
        ],
        "pairs": [
            {
                "experts": [report.experts[i].name, report.experts[j].name],
                **figure_json("cosine", report.cosines[i][j]),
                **figure_json("sign_agreement", report.agreements[i][j]),
                **_overlap_json(report.overlaps[i][j]),
            }
            for i in range(count)
            for j in range(i + 1, count)
        ],
        "left_out": dict(report.left_out),
    }


def _overlap_json(overlap: Overlap | None) -> dict[str, Any]:
    if overlap is None or math.isnan(overlap.share):
        return {"overlap": None, "overlap_low": None, "overlap_high": None}
    return {
        "overlap": overlap.share,
        "overlap_low": overlap.low,
        "overlap_high": overlap.high,
    }
