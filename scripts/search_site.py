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
)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_HIT = 'class="md-search-result__item"'


def hits(index: Path, word: str) -> list[str]:
    """The places of the index whose title or text has `word`."""
    found = []
    for entry in json.loads(index.read_text("utf-8"))["docs"]:
        text = re.sub(r"<[^>]+>", "", f"{entry['title']} {entry['text']}")
        if word.lower() in " ".join(text.lower().split()):
            found.append(entry["location"])
    return found


def hits_in_browser(browser: str, site: Path, word: str) -> int:
    """The pages that a reader is shown who opens `site` as a file and searches for `word`."""
    with tempfile.TemporaryDirectory() as profile:
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        address = f"{(site / 'index.html').resolve().as_uri()}?q={quote(word)}"
        words += ["--virtual-time-budget=20000", "--dump-dom", address]
        said = subprocess.run(words, check=True, capture_output=True, text=True, timeout=180)
    return said.stdout.count(_HIT)


def main(site: Path) -> int:
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    missing = []
    for word in WORDS:
        found = hits(site / "search" / "search_index.json", word)
        shown = "not looked at: no Chromium"
        if browser is not None:
            number = hits_in_browser(browser, site, word)
            shown = f"{number} pages from file://"
            if not number:
                found = []
        print(f"{word}: {len(found)} places ({', '.join(found[:3])}); {shown}")
        if not found:
            missing.append(word)
    if missing:
        print(f"error: no page for {', '.join(missing)}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
