"""Do the words that people bring from other trainers lead somewhere in the site that `make docs` has built?

    python scripts/search_site.py site

Looks into the index and, where a Chromium is, opens the first page from file:// with each of them in the search box:
there is no server to help. Exit code 1 if a word has no hit.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

WORDS = (
    *("warmup_ratio", "val_set_size", "sample packing", "continue training", "custom dataset"),
    *("QLoRA", "load_in_4bit", "gradient checkpointing", "DeepSpeed", "4090", "macOS", "GGUF"),
    *("gemma4_text", "Qwen/Qwen3-8B", "nvidia/Qwen3-32B-NVFP4"),  # a model_type and checkpoints: docs/support.md
)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_SHOWN = re.compile(r'class="md-search-result__item"><a href="([^"?#]*)')
_FIRST = 3  # of the pages that are shown: nobody looks further down


def hits(index: Path, word: str) -> list[str]:
    """The places of the index whose title or text has `word`."""
    found = []
    for entry in json.loads(index.read_text("utf-8"))["docs"]:
        text = re.sub(r"<[^>]+>", "", f"{entry['title']} {entry['text']}")
        if word.lower() in " ".join(text.lower().split()):
            found.append(entry["location"])
    return found


def shown_in_browser(browser: str, site: Path, word: str) -> list[str]:
    """The pages that a reader is shown, in order, who opens `site` as a file and searches for `word`."""
    with tempfile.TemporaryDirectory() as profile:
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        address = f"{(site / 'index.html').resolve().as_uri()}?q={quote(word)}"
        words += ["--virtual-time-budget=20000", "--dump-dom", address]
        said = subprocess.run(words, check=True, capture_output=True, text=True, timeout=180)
    return shown_pages(said.stdout, site.resolve().as_uri())


def shown_pages(text: str, root: str) -> list[str]:
    """The pages in the list of results of a page of the site, from `root` on."""
    return [address.removeprefix(f"{root}/") for address in _SHOWN.findall(text)]


def fault_of(word: str, found: list[str], shown: list[str] | None) -> str:
    """What is wrong with the answer to `word`; "" for nothing. shown: None where no browser was asked."""
    if not found:
        return f"{word}: it is on no page"
    pages = {place.partition("#")[0] for place in found}
    if shown is not None and not pages & {*shown[:_FIRST]}:
        return (
            f"{word}: of {', '.join(sorted(pages))} none is among the first {_FIRST} that are shown: {shown[:_FIRST]}"
        )
    return ""


def main(site: Path) -> int:
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    faults = []
    for word in WORDS:
        found, shown, said = hits(site / "search" / "search_index.json", word), None, "no Chromium was asked"
        if browser is not None:
            shown = shown_in_browser(browser, site, word)
            said = f"{len(shown)} pages from file://"
        print(f"{word}: {', '.join(found[:3])}; {said}")
        if fault := fault_of(word, found, shown):
            faults.append(fault)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
