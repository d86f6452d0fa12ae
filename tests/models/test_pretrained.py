"""Models of transformers by their folders: cut at every place, from real files, as a plain loop has them."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.runtime.architectures import ARCHITECTURES, LENGTH, Architecture, train_plainly
from tests.runtime.running import run_workers
from torch import Tensor, nn

from stagewright.errors import ModelError
from stagewright.models import Layered, build_model

transformers = pytest.importorskip("transformers")
DEFAULT = ("gpt2", "mistral", "t5")
"""Those that real workers train by default: tied, with a mask that is no input, with an encoder and a decoder."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TQDM_DISABLE", "1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each architecture's folder, as transformers saves it."""
    where = tmp_path_factory.mktemp("architectures")
    for name, about in ARCHITECTURES.items():
        about.folder(where / name)
    return where


def whole(folder: Path, about: Architecture) -> nn.Module:
    auto = getattr(transformers, f"AutoModelFor{about.task}")
    model: nn.Module = auto.from_pretrained(folder, dtype=torch.float32, **about.plainly).double()
    return model.train()


def cut_gradients(layered: Layered, inputs: list[Tensor], labels: Tensor, cuts: tuple[int, ...]) -> list[Tensor]:
    """The loss of one microbatch through stages that exchange nothing but tensors; gradients stay in the model."""
    values, held = tuple(inputs), []
    for first, last in pairwise((0, *cuts, layered.num_layers)):
        stage = layered.stage(first, last).train()
        received = tuple(
            each.detach().requires_grad_(spec.needs_grad and bool(held)) for each, spec in zip(values, stage.inputs)
        )
        values = stage(*received, *((labels,) if stage.has_loss else ()))
        held.append((received, values))
    loss = values[0] / layered.loss.count(labels)
    loss.backward()
    for (received, _), (_, made) in zip(held[:0:-1], held[-2::-1]):
        pairs = [(end, each.grad) for end, each in zip(made, received) if each.grad is not None and end.requires_grad]
        torch.autograd.backward([end for end, _ in pairs], [gradient for _, gradient in pairs])
    return [loss.detach()]


@pytest.mark.timeout(600)
def test_cut_at_every_place_it_is_the_plain_model(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twelve architectures: the loss, and the gradient of every parameter, cut at each place alone and at all."""
    rows = []
    for name, about in ARCHITECTURES.items():
        layered = build_model(f"hf:{folders / name}", sequence_length=LENGTH)
        layered.model.double()
        plain, (inputs, (labels,)) = whole(folders / name, about), about.batch(0)
        expected = about.mean(plain, 0)
        expected.backward()
        gradients = {each: parameter.grad for each, parameter in plain.named_parameters()}
        worst, cuts = 0.0, layered.cuts()
        for chosen in (*((cut,) for cut in cuts), cuts):
            layered.model.zero_grad(set_to_none=True)
            (loss,) = cut_gradients(layered, inputs, labels, chosen)
            assert abs(float(loss) - expected.item()) < 1e-12 * expected.item(), (name, chosen)
            for path, parameter in layered.model.named_parameters():
                assert (parameter.grad is None) == (gradients[path] is None), (name, chosen, path)
                if parameter.grad is not None:
                    gap = (parameter.grad - gradients[path]).norm() / gradients[path].norm().clamp(min=1e-12)
                    worst = max(worst, float(gap))
        assert worst < 1e-10, name
        assert len(cuts) >= 5, layered.names
        rows.append(
            f"  {name:10}{layered.num_layers:3} layers {len(cuts):3} cuts, tied: {bool(layered.tied)!s:6}{worst:.1e}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(rows))


def trained(folders: Path, names: tuple[str, ...], out: Path) -> dict[str, float]:
    """How far five steps by real workers are from the plain loop, by architecture and placement."""
    for name in names:
        losses, weights = train_plainly(folders / name, ARCHITECTURES[name])
        torch.save({"losses": losses, "weights": weights}, folders / name / "plain.pt")
    found: dict[str, float] = {}
    for size in (2, 4):
        result = out / f"{size}.json"
        run_workers(
            size, "tests.runtime.architectures", str(folders), ",".join(names), str(result), timeout_s=900,
            extra={"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        found |= json.loads(result.read_text())
    return found


@pytest.mark.timeout(900)
def test_real_workers_train_them_as_a_plain_loop_does(folders: Path, tmp_path: Path) -> None:
    found = trained(folders, DEFAULT, tmp_path)
    assert len(found) == 3 * len(DEFAULT)
    far = {key: value for key, value in found.items() if value > ARCHITECTURES[key.split()[0]].tolerance}
    assert not far, far


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_real_workers_train_all_of_them(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = trained(folders, tuple(ARCHITECTURES), tmp_path)
    with capsys.disabled():
        for name in ARCHITECTURES:
            print(
                "\n  " + "  ".join(f"{key} {value:.1e}" for key, value in found.items() if key.startswith(name)), end=""
            )
    assert len(found) == 3 * len(ARCHITECTURES)
    far = {key: value for key, value in found.items() if value > ARCHITECTURES[key.split()[0]].tolerance}
    assert not far, far


# What is refused


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        build_model(f"hf:{tmp_path / 'nowhere'}")
    with pytest.raises(ModelError, match=r"is no folder, and (its files are not here|no model of that name is here)"):
        build_model("hf:somebody/no-such-model")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        build_model(f"hf:{tmp_path}")


def test_a_configuration_that_cannot_be_read(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        build_model(f"hf:{tmp_path}")
    config = json.loads((folders / "bert" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForQuestionAnswering"]}))
    with pytest.raises(ModelError, match="BertForQuestionAnswering, which is no language model"):
        build_model(f"hf:{tmp_path}")


def test_weights_that_are_missing_or_cut_off(folders: Path, tmp_path: Path) -> None:
    shutil.copy(folders / "llama" / "config.json", tmp_path)
    with pytest.raises(ModelError, match="has no weights: neither"):
        build_model(f"hf:{tmp_path}")
    data = (folders / "llama" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=r"cannot be read: .*"):
        build_model(f"hf:{tmp_path}")
    shutil.copy(folders / "gpt2" / "model.safetensors", tmp_path)
    with pytest.raises(ModelError, match=r"no tensor in .* belongs to a LlamaForCausalLM"):
        build_model(f"hf:{tmp_path}")


def test_a_shard_that_is_missing(folders: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folders / "llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert build_model(f"hf:{tmp_path}", sequence_length=LENGTH).num_layers == 7
    shards[1].unlink()
    with pytest.raises(ModelError, match=rf"{shards[1].name} is missing, though model.safetensors.index.json names it"):
        build_model(f"hf:{tmp_path}")


def test_tensors_of_another_shape(folders: Path, tmp_path: Path) -> None:
    config = json.loads((folders / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    shutil.copy(folders / "llama" / "model.safetensors", tmp_path)
    with pytest.raises(ModelError, match=r"has the shape \(.*\), the model \(.*\)"):
        build_model(f"hf:{tmp_path}", sequence_length=LENGTH)


def test_what_cannot_be_cut(folders: Path, tmp_path: Path) -> None:
    for name, change, why in (
        ("mixtral", {"output_router_logits": True}, "balance of the router is over all rows"),
        ("opt", {"layerdrop": 0.1}, "layerdrop = 0.1 drops layers"),
    ):
        folder = tmp_path / name
        shutil.copytree(folders / name, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError, match=why):
            build_model(f"hf:{folder}", sequence_length=LENGTH)
    with pytest.raises(ModelError, match="a row of 33 tokens is longer than the 32"):
        build_model(f"hf:{folders / 'llama'}", sequence_length=33)


# Weights


def test_drawn_weights_do_not_depend_on_the_plan(folders: Path) -> None:
    """Stage by stage, in any order, as all at once; another seed draws others."""
    for name in ("gpt2", "t5", "mixtral"):
        given = {"sequence_length": LENGTH, "from_scratch": True, "load": False}
        at_once = build_model(f"hf:{folders / name}", **given).loaded("cpu").model.state_dict()
        layered = build_model(f"hf:{folders / name}", **given)
        for first, last in reversed(list(pairwise((0, *layered.cuts(), layered.num_layers)))):
            layered.load(first, last, "cpu")
        for path, found in layered.model.state_dict().items():
            assert torch.equal(found, at_once[path]), (name, path)
        assert not torch.equal(
            build_model(f"hf:{folders / name}", seed=1, **given).loaded("cpu").model.state_dict()[path], at_once[path]
        )


def test_a_stage_reads_its_own_tensors_alone(folders: Path) -> None:
    layered = build_model(f"hf:{folders / 'llama'}", sequence_length=LENGTH, load=False)
    assert all(each.is_meta for each in layered.model.parameters())
    layered.load(1, 3, "cpu")
    read = {name for name, each in layered.model.named_parameters() if not each.is_meta}
    assert read == set(layered.parameter_names(1, 3))
    assert read


def test_attention_has_no_mask_where_it_needs_none(folders: Path) -> None:
    """Causal blocks get None, so that attention is the fused kernel; a sliding window that is shorter gets its mask."""
    for name, has_mask in (("llama", False), ("gpt2", False), ("mistral", True)):
        layered = build_model(f"hf:{folders / name}", sequence_length=LENGTH, device="meta")
        blocks = [node for node in layered.order if ".layers." in str(node.target) or ".h." in str(node.target)]
        assert len(blocks) == 3
        given = [[*node.args, *node.kwargs.values()] for node in blocks]
        masks = [each for args in given for each in args if getattr(each, "meta", {}).get("val", None) is not None]
        found = [node.kwargs.get("attention_mask", node.args[2] if len(node.args) > 2 else None) for node in blocks]
        assert [each is not None for each in found] == [has_mask] * 3, (name, masks)


def test_a_new_head_is_drawn_and_said(folders: Path) -> None:
    with pytest.warns(UserWarning, match=r"has no '.*' and \d more: drawn instead"):
        layered = build_model(f"hf:{folders / 'bert'}", sequence_length=LENGTH, num_classes=3, load=False)
    assert [spec.name for spec in layered.inputs] == ["input_ids", "attention_mask"]
    assert layered.targets[0].shape_per_row == ()
    with pytest.raises(ModelError, match="names no pad_token_id"):
        build_model(f"hf:{folders / 'llama'}", sequence_length=LENGTH, num_classes=3, load=False)


# Models of one's own


def test_a_function_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch, stagewright as sw\n"
        "def net():\n"
        "    chain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))\n"
        "    rows, labels = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64)\n"
        "    return sw.make_layered(chain, (rows,), loss=sw.cross_entropy_sum(), targets=(labels,))\n"
        "def other():\n    return 3\n"
    )
    one, again, other = (build_model(f"python:{file}:net", seed=seed) for seed in (0, 0, 1))
    assert one.names == ("0", "1", "loss")
    assert torch.equal(one.model[0].weight, again.model[0].weight)
    assert not torch.equal(one.model[0].weight, other.model[0].weight)
    for name, why in (
        (f"python:{file}:other", "returned a int, not layers"),
        (f"python:{file}:nothing", "has no function nothing"),
        (f"python:{tmp_path}/none.py:net", "there is no file"),
        ("python:mine.py", "names no function of a file"),
    ):
        with pytest.raises(ModelError, match=why):
            build_model(name)
