"""The card: everything in it that is a number comes from the run's record."""

from typing import Any

TABLE_ROWS = 10  # of the training curve


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def data_section(manifest: dict[str, Any], found: dict[str, Any]) -> str:
    pools = manifest["pools"]
    names = {
        "library": "library, trained on",
        "tests": "the library's own tests, trained on",
        "held_library": "library, held out",
        "held_tests": "tests, held out",
    }
    rows = [[text, str(len(pools[name]["files"])), megabytes(pools[name]["bytes"])] for name, text in names.items()]
    return f"""\
## Data

The standard library of CPython {manifest["python"]}: `.py` files of 200 bytes or more, tabs expanded, without vendored
packages, generated tables, documentation topics and build configuration. A file is held out where
sha256(path) mod 20 is 7. `manifest.json` names every file with its hash.

{table(["pool", "files", "text"], rows)}

{len(manifest["dropped_for_notices"])} files that carry the notice of somebody other than the Python Software Foundation
were left out of both. {100 * found["shared_lines"]:.1f} % of the held-out library lines of 40 characters or more also
stand in a trained file (licence headers, idioms); tests of a held-out module may be trained on."""


def recipe_section(run: dict[str, Any]) -> str:
    shape, recipe = run["shape"], run["recipe"]
    epochs = run["tokens"] * (1 - recipe["test_share"]) / run["stream_tokens"]["library"]
    return f"""\
## Recipe

`{shape["arch"]}` in the names of transformers: layers `{shape["layers"]}` (S sliding window of {shape["window"]},
F full, C short convolution), width {shape["width"]}, {shape["heads"]} query and {shape["key_heads"]} key heads of
{shape["head_size"]}, MLP {shape["inner"]}, tied head, vocabulary {shape["vocabulary"]} (byte-level BPE):
{run["parameters"]} parameters.

{run["steps_done"]} of {recipe["steps"]} steps of {recipe["step_tokens"]} tokens ({run["tokens"] / 1e6:.1f} million;
{epochs:.1f} passes over the library files), seed {recipe["seed"]}. {100 * recipe["test_share"]:.0f} % of the windows
come from the tests. Half of the windows begin with a BOS and a line at column 0, half anywhere. Windows of
{recipe["window"]}, in the last {100 * recipe["long_share"]:.0f} % of the steps of {recipe["long_window"]}. Muon for
matrices and AdamW for the rest, rate {recipe["rate"]} falling in a straight line to {100 * recipe["last_rate"]:.0f} %
of it after {recipe["warm_up"]} steps of warm-up, weight decay {recipe["weight_decay"]}, gradients clipped at
{recipe["clip"]:g}; bfloat16 weights with float32 masters; no dropout. `python scripts/train_embedded.py` repeats it;
the same corpus and seed on another processor will not give the same bits.

It took {run["seconds"] / 60:.0f} minutes on {run["machine"]}, with torch {run["torch"]}."""


def results_section(run: dict[str, Any], found: dict[str, Any]) -> str:
    looks = run["looks"]
    every = max(1, -(-len(looks) // TABLE_ROWS))
    kept = looks[::-1][::every][::-1]
    curve = [
        [f"{k['tokens'] / 1e6:.1f}", f"{k['seconds'] / 60:.0f}", f"{k['train_nats']:.3f}", f"{k['held_out_nats']:.3f}"]
        for k in kept
    ]
    library = found["library"]
    losses = [["library, all of it", f"{library['nats']:.3f}", f"{library['bits_per_byte']:.3f}"]]
    if "tests" in found:
        losses.append(["tests, all of it", f"{found['tests']['nats']:.3f}", f"{found['tests']['bits_per_byte']:.3f}"])
    windows = ", ".join(f"{length}: {nats:.3f}" for length, nats in found["by_window"].items())
    return f"""\
## Loss

Held-out text in windows of 1024 tokens, weights in bfloat16 as shipped:

{table(["held out", "nats per token", "bits per byte"], losses)}

xz, primed with the training text, needs {found["xz_bits_per_byte"]:.3f} bits per byte of the held-out library. On
library text it was trained on the model's loss is {found["trained_library_nats"]:.3f} nats. Held-out nats by window
length, on a sample: {windows}; positions beyond {run["recipe"]["long_window"]} were not trained.

While training (held out: {run["look_windows"]} windows of {run["recipe"]["window"]}):

{table(["million tokens", "minutes", "trained on", "held out"], curve)}"""


def samples_section(heard: dict[str, Any]) -> str:
    rows = [
        [f"{b['temperature']:g}", f"{b['penalty']:g}", str(b["count"]), str(b["parses"]), str(b["loops"])]
        for b in heard["bodies"]
    ]
    shown = [
        f"T = {s['temperature']:g}\n\n````text\n{s['prompt']}>>>{s['text'].rstrip()}\n````" for s in heard["samples"]
    ]
    return f"""\
## Samples

Signatures of held-out functions, continued for 128 tokens (top-p 0.95). *Parses*: the body came to its end and the
function is Python. *Loops*: the text ends in one phrase over and over.

{table(["temperature", "repetition penalty", "functions", "parses", "loops"], rows)}

First tries, neither picked nor edited; `>>>` marks where the model begins. Temperature 0 is without a repetition
penalty, 0.8 with the defaults of `generation_config.json`.

{chr(10).join(text + chr(10) for text in shown)}"""


def render(manifest: dict[str, Any], *, provisional: bool) -> str:
    """The card of the model that `manifest` describes."""
    run, found = manifest["run"], manifest["run"]["found"]
    state = "\n**Provisional:** taken from a run that was still going on.\n" if provisional else ""
    return f"""\
# The embedded model

A demo model, not a code assistant. It has {run["parameters"] / 1e6:.1f} million parameters and continues text in the
manner of the Python standard library: it is locally Python-like and means nothing. It is here so that the program
answers within seconds, and so that tests run on real weights with more than one kind of memory. A chat with it is
a text that is continued: messages are set one under the other, a system message as a comment.
{state}
{data_section(manifest, found)}

## Licence and notices

The weights and the tokenizer derive from CPython's standard library and are offered under the Python Software
Foundation License Version 2: `LICENSE.txt` is that CPython's, `NOTICE` says what was used. A small model that read its
text several times can repeat passages of it.

{recipe_section(run)}

{results_section(run, found)}

{samples_section(run["heard"])}"""
