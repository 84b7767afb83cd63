"""README and docs: links lead somewhere, files that commands name exist, and lines can be read."""

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("results/**/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_exist(page):
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    assert not [link for link in links if not (page.parent / link).exists()]
    named = re.findall(r"\b(?:configs|scripts|diagnostics|attention|data|tests)/[\w./]+\.(?:py|toml|sh|sbatch)\b", text)
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name not in ("mini", "gpt2")],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page):
    """But for rows of tables and for code."""
    prose = "".join(page.read_text().split("```")[::2]).splitlines()
    assert not [line for line in prose if len(line) > 160 and not line.startswith("|")]


def test_every_page_is_linked_from_the_readme():
    readme = PAGES[0].read_text()
    assert not [page for page in ROOT.glob("docs/*.md") if f"(docs/{page.name})" not in readme]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_tables(page):
    """A heading, a rule and rows of as many cells each; no row stands alone, or in a paragraph."""
    text = re.sub(r"`[^`\n]*`", "code", "".join(page.read_text().split("```")[::2]))
    lines = [line.strip().replace(r"\|", "") for line in text.splitlines()]
    for is_table, block in itertools.groupby(lines, lambda line: line.startswith("|")):
        rows = list(block)
        if is_table:
            assert len(rows) > 2 and re.fullmatch(r"\|(:?-+:?\|)+", rows[1].replace(" ", "")), rows[:2]
            assert {row.count("|") for row in rows} == {rows[0].count("|")}, rows[0]
            assert all(row.endswith("|") for row in rows), rows[0]
        else:
            assert not [line for line in rows if "|--" in line or "| |" in line or line.endswith(" |")]
