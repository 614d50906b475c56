"""The model card. All its numbers come from the record of the run."""

import re
import textwrap
from typing import Any

TABLE_ROWS = 10  # of the training curve
LAYER_WORDS = {"S": "sliding window of {window}", "F": "full attention", "C": "short convolution of {kernel}"}


def paragraph(text: str) -> str:
    """Wraps lines; text in backticks is not broken."""
    whole = re.sub(r"`[^`]*`", lambda quoted: quoted[0].replace(" ", "\0"), " ".join(text.split()))
    return textwrap.fill(whole, 116, break_on_hyphens=False, break_long_words=False).replace("\0", " ")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def opening(run: dict[str, Any]) -> list[str]:
    text = f"""
    A demo model, not a code assistant. It has {run["parameters"] / 1e6:.1f} million parameters and continues text in
    the manner of the Python standard library: it is locally Python-like and means nothing. It is here so that the
    program answers within seconds, and so that tests run on real weights with more than one kind of memory. A chat
    with it is a text that is continued: messages are set one under the other, a system message as a comment."""
    unfinished = run["steps_done"] < run["recipe"]["steps"]
    provisional = ["**Provisional:** taken from a run that was not finished."] if unfinished else []
    return ["# The embedded model", paragraph(text), *provisional]


def data_section(manifest: dict[str, Any]) -> list[str]:
    pools, found = manifest["pools"], manifest["run"]["found"]
    names = {
        "library": "library, trained on",
        "tests": "the library's own tests, trained on",
        "held_library": "library, held out",
        "held_tests": "tests, held out",
    }
    rows = [
        [words, str(len(pools[name]["files"])), f"{pools[name]['bytes'] / 1e6:.2f} MB"] for name, words in names.items()
    ]
    source = f"""
    The standard library of CPython {manifest["python"]}: `.py` files of 200 bytes or more, tabs expanded, without
    vendored packages, generated tables, documentation topics and build configuration. A file is held out where
    sha256(path) mod 20 is 7. `manifest.json` names every file with its hash."""
    limits = f"""
    {len(manifest["dropped_for_notices"])} files that carry the notice of somebody other than the Python Software
    Foundation are in none of these. {100 * found["shared_lines"]:.1f} % of the held-out library lines of 40
    characters or more also stand in a trained file (headers, idioms); tests of a held-out module may be trained on."""
    return ["## Data", paragraph(source), table(["pool", "files", "text"], rows), paragraph(limits)]


def licence_section() -> list[str]:
    text = """
    The weights and the tokenizer derive from CPython's standard library and are offered under the Python Software
    Foundation License Version 2: `LICENSE.txt` is that CPython's, `NOTICE` says what was used. A small model that read
    its text several times can repeat passages of it."""
    return ["## Licence and notices", paragraph(text)]


def recipe_section(run: dict[str, Any]) -> list[str]:
    shape, recipe = run["shape"], run["recipe"]
    letters = ", ".join(f"{k} {words.format(**shape)}" for k, words in LAYER_WORDS.items() if k in shape["layers"])
    epochs = run["tokens"] * (1 - recipe["test_share"]) / run["stream_tokens"]["library"]
    network = f"""
    `{shape["arch"]}` in the names of transformers, layers `{shape["layers"]}` ({letters}), width {shape["width"]},
    {shape["heads"]} query and {shape["key_heads"]} key heads of {shape["head_size"]}, MLP {shape["inner"]}, tied head,
    vocabulary {shape["vocabulary"]} (byte-level BPE): {run["parameters"]} parameters."""
    steps = f"""
    {run["steps_done"]} of {recipe["steps"]} steps of {recipe["step_tokens"]} tokens: {run["tokens"] / 1e6:.1f} million,
    {epochs:.1f} passes over the library files; {100 * recipe["test_share"]:.0f} % of the windows come from the tests.
    Half of the windows begin with a BOS and a line at column 0, half anywhere. They have {recipe["window"]} tokens, in
    the last {100 * recipe["long_share"]:.0f} % of the steps {recipe["long_window"]}. Muon for matrices and AdamW for
    the rest, rate {recipe["rate"]} falling in a straight line to {100 * recipe["last_rate"]:.0f} % of it after
    {recipe["warm_up"]} steps of warm-up, weight decay {recipe["weight_decay"]}, gradients clipped at
    {recipe["clip"]:g}; bfloat16 weights with float32 masters; no dropout; seed {recipe["seed"]}.
    The trainer's default rate was chosen after trials of 60 steps, compared on held-out text.
    `python scripts/train_embedded.py` repeats it; another processor will not give the same bits."""
    cost = f"It took {run['seconds'] / 60:.0f} minutes on {run['machine']}, with torch {run['torch']}."
    return ["## Recipe", *(paragraph(text) for text in (network, steps, cost))]


def head_section(head: dict[str, Any]) -> list[str]:
    """Of the MTP head."""
    recipe = head["recipe"]
    unfinished = head["steps_done"] < recipe["steps"]
    what = f"""
    `mtp.safetensors` drafts tokens for speculative decoding: {head["parameters"]} parameters in the names of
    transformers' `MtpModel`, one layer with full attention that joins the model's hidden state at a token (the input of
    its output head) with the embedding of the next token, and predicts the token after that. Its own output takes the
    place of the hidden state for the drafts behind the first. Embedding and output head are the model's, whose weights
    were not changed."""
    how = f"""
    {head["steps_done"]} of {recipe["steps"]} steps of {recipe["step_tokens"]} tokens, {head["tokens"] / 1e6:.1f}
    million, of the same files; windows and optimiser are those of the model, rate {recipe["rate"]}, seed
    {recipe["seed"]}. The loss is the cross-entropy to the model's distribution, over chains of {recipe["chain"]}
    drafts, each with {recipe["falling"]:g} times the weight of the one before.
    `python scripts/train_embedded.py --stage head` repeats it. It took {head["seconds"] / 60:.0f} minutes on
    {head["machine"]}, with torch {head["torch"]}."""
    measured = """
    Acceptance by position: the probability that a draft is accepted, given that those before it were, on continuations
    of held-out library files, sampled from the model at that temperature (texts that end in a loop are left out); in
    the last column that of a first draft behind each token of the files themselves.
    `python scripts/train_embedded.py --stage head --measure` prints it."""
    depth = len(head["acceptance"][0]["accepted"])
    rows = [
        [f"{a['temperature']:g}", str(a["texts"]), str(a["drafts"])]
        + [f"{rate:.3f}" for rate in (*a["accepted"], a["on_files"])]
        for a in head["acceptance"]
    ]
    return [
        "## MTP head",
        *(["**Provisional:** taken from a run that was not finished."] if unfinished else []),
        *(paragraph(text) for text in (what, how, measured)),
        table(["temperature", "texts", "first drafts", *(f"draft {i + 1}" for i in range(depth)), "files"], rows),
    ]


def curve(run: dict[str, Any]) -> str:
    """At most TABLE_ROWS evaluations, the last among them."""
    looks = run["looks"]
    kept = looks[:: -max(1, -(-len(looks) // TABLE_ROWS))][::-1]
    rows = [
        [f"{k['tokens'] / 1e6:.1f}", f"{k['seconds'] / 60:.0f}", f"{k['train_nats']:.3f}", f"{k['held_out_nats']:.3f}"]
        for k in kept
    ]
    return table(["million tokens", "minutes", "trained on", "held out"], rows)


def results_section(run: dict[str, Any]) -> list[str]:
    found, recipe = run["found"], run["recipe"]
    pools = [(name, found[name]) for name in ("library", "tests") if name in found]
    losses = [[f"{name}, all of it", f"{loss['nats']:.3f}", f"{loss['bits_per_byte']:.3f}"] for name, loss in pools]
    windows = ", ".join(f"{length}: {nats:.3f}" for length, nats in found["by_window"].items())
    beside = f"""
    xz, primed with the training text, needs {found["xz_bits_per_byte"]:.3f} bits per byte of the held-out library. On
    library text it was trained on the model's loss is {found["trained_library_nats"]:.3f} nats. Held-out nats by window
    length, on a sample: {windows}; positions beyond {recipe["long_window"]} were not trained."""
    while_training = f"While training; held out are {run['look_windows']} windows of {recipe['window']}:"
    return [
        "## Loss",
        "Held-out text in windows of 1024 tokens, weights in bfloat16 as shipped:",
        table(["held out", "nats per token", "bits per byte"], losses),
        paragraph(beside),
        while_training,
        curve(run),
    ]


def samples_section(heard: dict[str, Any]) -> list[str]:
    rows = [
        [f"{b['temperature']:g}", f"{b['penalty']:g}", str(b["count"]), str(b["parses"]), str(b["loops"])]
        for b in heard["bodies"]
    ]
    bodies = """
    Signatures of held-out functions, continued for 128 tokens (top-p 0.95). *Parses*: the body came to its end and the
    function is Python. *Loops*: the text ends in one phrase over and over."""
    first = "First tries, neither picked nor edited, without a repetition penalty; `>>>` marks where the model begins."
    shown = [f"T = {s['temperature']:g}\n\n````text\n{s['prompt']}>>>{s['text']}\n````" for s in heard["samples"]]
    head = ["temperature", "repetition penalty", "functions", "parses", "loops"]
    return ["## Samples", paragraph(bodies), table(head, rows), first, *shown]


def render(manifest: dict[str, Any]) -> str:
    """The card of the model that `manifest` describes."""
    run = manifest["run"]
    blocks = [
        *opening(run),
        *data_section(manifest),
        *licence_section(),
        *recipe_section(run),
        *results_section(run),
        *(head_section(manifest["mtp"]) if "mtp" in manifest else []),
        *samples_section(run["heard"]),
    ]
    return "\n\n".join(blocks) + "\n"
