"""What docs/support.md says beside each refusal: what would be needed; and its line of counts.

Owns: reason of a refusal -> what has to be built, by whom (us, transformers, PEFT, the user). A reason that no pattern
knows stands on the page as such, which a test refuses: who adds a refusal says what is needed. Does not own: reasons.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# The first pattern that is found in a reason decides.
_NEEDS = (
    (r"No module named|requires the .* library", "the user: install the named package; it is no dependency of ours"),
    (r"nor meshlora has a tensor-parallel plan", "a line in wings/tables/tables.py, and a proof"),
    (r"only decoder-only|of encoder-decoders", "an encoder of images: what it reads in pairs, and its layers whole"),
    (r"leave out auto_map", "the user: two lines of config.json, as the message says"),
    (r"custom code which must be|its own code is not trusted",
     "the user: trust_remote_code, where its code passes the preflight; else a class in transformers"),
    (r"Unrecognized configuration class", "an Auto class of transformers that makes it a language model"),
    (r"sees other tokens neither|states? of (its|their) own|itself numbers the tokens", "its reads of other tokens "
     "through transformers' cache or attention functions, which cp stands in for"),
    (r"reads \w+ of its attention mask", "a mask of whole rows for its own code under cp"),
    (r"calls \w+ on its logits|sets the logits of", "that operation over a split vocabulary, exact on each rank"),
    (r"takes no text without (images|audio)|asks for mm_token_type_ids",
     "runs on images or sound, as its forward asks for; or a forward of transformers that takes text alone"),
    (r"second input that carries a gradient|residual stream is several|beside the residual stream|indexer runs once",
     "its second stream cut, sent and proved as the first one is"),
    (r"norm before its layers|past the border of sp|past the cut of sp", "that module's place in the plan: before or "
     "after the layers, with its own cut"),
    (r"puts other modules in place|layers are reversible|by their language, in whole|weights that are stored once|"
     "it is one weight with|table of relative positions",
     "a split of that form of layer"),
    (r"reads weights of layers, or of the embedding|device of its tower|last norm runs|share an activation|"
     "run three times, and stages once", "what other stages hold sent to this one, with its gradient"),
    (r"styles that are not supported", "the style of transformers' plan read in plan/families/styles.py"),
    (r"experts do not have the form", "its form in wings/experts/forms.py"),
    (r"experts stand beside", "the router and its experts planned in the layer itself"),
    (r"exactly one list of decoder layers", "a plan that knows which list is the decoder, and keeps the others whole"),
    (r"several models", "the user: the part that is a language model, as a checkpoint of its own"),
    (r"conversion on load", "that conversion read in model/stored.py"),
    (r"PEFT renames its factors", "PEFT: a name that it takes for that of the module"),
    (r"under (names|a name) that (it does not load|its decoder)|overflows on it in float64|lacks vision_start|"
     "itself ends in an error", "transformers: it differs from itself there"),
    (r"zeroes the padding", "transformers: it differs from itself there"),
    (r"embedding or its output head", "an embedding of that form, split by its rows"),
    (r"has no twin|no twin of it|cannot be shrunk", "tiny sizes that fit together: a line in meshlora_judge/twin.py"),
    (r"no gradient: text does not pass", "the user: exclude_modules, as the message says; or images"),
    (r"is not read yet|it lacks \d+ weights", "a reader of that format in wings/quantized"),
    (r"transformers refuses it|has no such family", "a transformers that knows it"),
    (r"cannot build it", "a configuration that can be built: a default, or a line in meshlora_judge/twin.py"),
    (r"not on tp=2: no record|is not proved against one process", "a proof of its split over tp first"),
)  # fmt: skip


# A proof of all families runs for half an hour, and must not end without its page; a test has no page with this.
UNKNOWN = "not known: no pattern in scripts/support_needs.py"


def need(reason: str) -> str:
    """What would be needed to have no such refusal. `need("model_type 'x': only decoder-only ...")`."""
    for pattern, words in _NEEDS:
        if re.search(pattern, reason):
            return words
    return UNKNOWN


def needs_of(cells: Iterable[str]) -> str:
    """Those of a row's cells "refused: reason", each once; empty if none is refused."""
    reasons = [cell.removeprefix("refused:") for cell in cells if cell.startswith("refused")]
    return "; ".join(dict.fromkeys(need(reason) for reason in reasons)).replace("|", "\\|")


def counts_line(families: int, proved: dict[str, int], checkpoints: dict[str, int]) -> str:
    """The first line of the page."""
    of_families = ", ".join(f"{number} on {part}" for part, number in proved.items())
    of_files = ", ".join(f"{number} {status}" for status, number in checkpoints.items())
    return (
        f"**{families} families: proved are {of_families}. "
        f"{sum(checkpoints.values())} published checkpoints: {of_files}.**"
    )


def checkpoints_on(page: str) -> dict[str, int]:
    """The counts that the part of the published checkpoints says of itself; empty if it is not there."""
    found = re.search(r"^\d+ published checkpoints: (.*)\.$", page, re.MULTILINE)
    words = found[1].split(", ") if found else []
    return {word.partition(" ")[2]: int(word.partition(" ")[0]) for word in words}
