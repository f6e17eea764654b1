"""Pages say what the record of proofs says, name faults that there are, and their links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from meshlora.cli.main import main
from meshlora.verify import command
from meshlora.verify.faults.registry import MUTATIONS
from meshlora.verify.request import Proof
from meshlora.wings.proved.families import PROVED, PROVED_CONTEXT, PROVED_STAGES
from tests.changed import is_there
from tests.for_each import for_each
from tests.published_twins import names
from tests.scripts import ROOT, load_script


def test_pages_are_written_from_the_record() -> None:
    script = load_script("prove_families")
    record = json.loads(script.RECORD.read_text())
    for (page, begin, end), text in ((script.MATRIX, script.matrix), (script.SUMMARY, script.summary)):
        block = page.read_text().partition(begin)[2].partition(end)[0]
        assert block.strip() == text(record["families"]).strip(), page
    assert max(error for found in record["families"].values() for error in found.values()) <= 1e-11


def test_no_family_has_failed_and_the_proved_ones_are_those_of_the_record() -> None:
    script = load_script("prove_families")
    rows = script.rows_of((ROOT / "docs" / "support.md").read_text().partition(script.AFTER)[0])
    for part, proved in ((script.SPLIT, PROVED), (script.CONTEXT, PROVED_CONTEXT), (script.STAGES, PROVED_STAGES)):
        statuses = {family: cells[part.name].partition(":")[0] for family, cells in rows.items()}
        assert set(statuses.values()) == {"proved", "refused"}
        assert {family for family, status in statuses.items() if status == "proved"} == proved
    assert not [cell for cells in rows.values() for cell in cells.values() if "checkpoint /" in cell]


def test_published_checkpoints_are_all_on_the_page_and_none_has_failed() -> None:
    rows = [line.split(" | ") for line in (ROOT / "docs" / "support.md").read_text().splitlines() if line[:2] == "| "]
    statuses = {row[0].removeprefix("| "): row[3] for row in rows if len(row) == 10 and "/" in row[0]}
    assert {name.replace("/", "--") for name in statuses} == set(names())
    assert set(statuses.values()) == {"ready", "refused"}
    assert sum(status == "ready" for status in statuses.values()) >= 50


def test_readme_counts_the_deliberate_faults() -> None:
    assert f"{len(MUTATIONS)} deliberate" in " ".join((ROOT / "README.md").read_text().split())


REASONS = re.findall(r"\| `(--family .*?)` \|$", (ROOT / "docs" / "why.md").read_text(), re.MULTILINE)


@for_each("words", REASONS)
def test_fault_of_a_public_thread_can_show_where_it_is_put(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class FoundError(Exception):
        pass

    def found(proof: Proof, *_: object) -> None:
        assert proof.mutations_on(proof.topologies[0]) == list(proof.request.mutations)
        raise FoundError

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "_run", found)
    with pytest.raises(FoundError):
        main(["verify", *shlex.split(words)])


@pytest.mark.proof
@pytest.mark.parametrize("words", REASONS)
def test_fault_of_a_public_thread_is_caught(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["verify", *shlex.split(words)]) == 0


def test_readme_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_first_screen_says_why_with_numbers_and_a_command_and_shows_the_proof() -> None:
    first = (ROOT / "README.md").read_text("utf-8").partition("\n## ")[0]
    why = first.partition("**Why.**")[2].partition("<!--")[0].strip().splitlines()
    assert len(why) <= 10
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    numbers = re.findall(r"[\d.]+× \([\d,.]+ [\w/]+\)", first)
    assert len(numbers) >= 4
    assert not [number for number in numbers if number not in page], "each is on the page that says by which command"
    assert "docs/images/proved.png" in first
    commands = re.findall(r"^(meshlora .*?)(?: {2,}#.*)?$", first, re.MULTILINE)
    assert commands
    assert not [command for command in commands if re.search(r"MODEL|FOLDER|examples/|\.yaml", command)]
    tried = load_script("try_wheel").COMMANDS  # in an environment of the wheel alone
    assert ["meshlora", *tried[1][0]] == shlex.split(commands[0])


def test_each_capability_has_tests_that_are_there() -> None:
    lines = (ROOT / "docs" / "capabilities.md").read_text("utf-8").splitlines()
    rows = [line for line in lines if line[:2] == "| " and line != "| capability | page | test |"]
    tests = [test for row in rows for test in re.findall(r"`([^`]+)`", row.split(" | ")[-1])]
    assert len(rows) > 150
    assert not [row for row in rows if "`tests/" not in row.split(" | ")[-1]]
    assert not [test for test in tests if not is_there(test)]


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def _places(text: str) -> set[str]:
    """What a link may name behind `#`."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="(.*?)">', text))


@for_each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text("utf-8"))
    found = [(page.parent / file if file else page, place) for file, place in links]
    assert not [file for file, _ in found if not file.exists()]
    assert not [f"{file}#{place}" for file, place in found if place and place not in _places(file.read_text("utf-8"))]


def test_every_page_is_in_the_site() -> None:
    """Where `make docs` would warn: pages are named by one who knows where a reader looks for them."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    named = re.findall(r"([\w/.-]+\.md)$", nav, re.MULTILINE)
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert len(named) == len(set(named))
    assert set(named) == pages


def test_words_that_people_bring_from_other_trainers_are_on_a_page() -> None:
    """`make docs` asks its index, and a browser, for them: scripts/search_site.py."""
    words = load_script("search_site").WORDS
    pages = [" ".join(page.read_text("utf-8").lower().split()) for page in (ROOT / "docs").rglob("*.md")]
    assert {"warmup_ratio", "val_set_size", "sample packing", "continue training", "custom dataset"} <= {*words}
    assert not [word for word in words if not any(word.lower() in page for page in pages)]


def test_hits_are_counted_in_titles_and_texts_without_their_tags(tmp_path: Path) -> None:
    index = tmp_path / "search_index.json"
    entries = [("a.html", "Sample packing", "<p>none</p>"), ("b.html", "", "<p>val<code>_set_size</code> of\none</p>")]
    docs = [{"location": place, "title": title, "text": text} for place, title, text in entries]
    index.write_text(json.dumps({"docs": docs}))
    script = load_script("search_site")
    assert [script.hits(index, word) for word in ("sample PACKING", "val_set_size of one", "p>none")] == [
        ["a.html"],
        ["b.html"],
        [],
    ]


def test_word_must_lead_to_its_page_among_the_first_that_are_shown() -> None:
    script = load_script("search_site")
    link = '<li class="md-search-result__item"><a href="file:///site/{}.html?h=x#y" class="z">'
    shown = script.shown_pages("".join(map(link.format, "abcd")), "file:///site")
    assert shown == ["a.html", "b.html", "c.html", "d.html"]
    assert script.fault_of("word", ["e.html", "c.html#place"], shown) == ""
    assert "none is among the first" in script.fault_of("word", ["d.html"], shown)
    assert "it is on no page" in script.fault_of("word", [], shown)
    assert script.fault_of("word", ["d.html"], None) == ""


def test_site_takes_nothing_from_the_network() -> None:
    """The theme's plugin for search without a server loads a script from a host, unless one of this name is there."""
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "\nplugins: [search, offline]\n" in settings
    (polyfill,) = re.findall(r"polyfills: \[(.*iframe-worker.*)\]", settings)
    (style,) = re.findall(r"extra_css: \[(.*)\]", settings)
    for file in (polyfill, style):
        assert "//" not in re.sub(
            r"^\s*//.*$|file://", "", (ROOT / "docs" / file).read_text("utf-8"), flags=re.MULTILINE
        )
    assert "font: false" in settings


def test_first_page_of_the_site_is_short_and_not_the_readme() -> None:
    page, readme = ((ROOT / name).read_text("utf-8").splitlines() for name in ("docs/index.md", "README.md"))
    assert len(page) <= 70
    assert len({*page} & {*readme} - {"", "```", "# meshlora"}) <= 4
    assert len(re.findall(r"\]\([\w-]+\.md", "\n".join(page))) > 20
