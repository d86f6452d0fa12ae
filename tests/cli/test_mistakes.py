"""Mistakes that people make: each is answered in a line or two, with what they typed and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stagewright.cli import main

from .conftest import Run

MISTAKES: list[tuple[str, str, str]] = [
    ("modells", "no such command 'modells'. Did you mean 'models'?", "see `stagewright --help`"),
    ("models vg16", "no model is called 'vg16'", "did you mean vgg16"),
    *(
        []
        if torch.cuda.is_available()
        else [("train tiny-cnn --device cuda --steps 2", "--device is cuda, but torch", "use --device cpu")]
    ),
    ("models --layer", "no such option: --layer", "see `stagewright models --help`"),
    ("models vgg16 --json=1", "option '--json' does not take a value", "see `stagewright models --help`"),
    ("simulate", "missing argument 'PLAN|MODEL'", "see `stagewright simulate --help`"),
    ("train --batch 8", "missing argument 'MODEL'", "name one of `stagewright models`"),
    (
        "simulate mlp --batch 8 --cluster titan-v-8 --placement 0:0-6.0:9",
        "names device 9 of host 0, which has devices 0 to 7",
        "--cluster",
    ),
    ("simulate mlp --batch 8 --cluster moon", "no cluster is named 'moon'", "give one of these names"),
    ("simulate mlp --batch 8 --cluster titan-v-8 --devices 9", "--devices 9: titan-v-8 has 8", "another --cluster"),
    ("simulate mlp --batch 8,x --cluster titan-v-8", "--batch is '8,x': expected whole numbers such as", ""),
    (
        "simulate plan.json --profile plan.json",
        "plan.json: key format is 'stagewright.plan'",
        "it holds a plan, and a profile is wanted",
    ),
    (
        "simulate mlp --batch 8 --cluster plan.json",
        "plan.json: key format is 'stagewright.plan'",
        "it holds a plan, and a cluster is wanted",
    ),
    (
        "plan plan.json --batch 8",
        "plan.json: key format is 'stagewright.plan'",
        "it holds a plan, and a profile is wanted",
    ),
    ("plan vgg16 --cluster titan-v-8", "the batch is not given", "add --batch ROWS"),
    (
        "plan vgg16 --cluster titan-v-8 --batch 8 --staleness spp",
        "--staleness is 'spp': expected 0, ssp, 2bw, or versions of each stage such as 2,1",
        "",
    ),
    (
        "plan vgg16 --cluster titan-v-8 --batch 8 --schedule 1f2b",
        "--schedule is '1f2b': expected one of gpipe, 1f1b",
        "",
    ),
    ("plan vgg16 --cluster titan-v-8 --batch 8 --cut fc1,", "--cut 'fc1,' names no layer", "fc1,fc2"),
    ("schedule nowhere.json", "nowhere.json: No such file or directory", "give the path"),
    ("schedule --replicas 3,1 --microbatches six", "--microbatches is 'six': expected a whole number", "--help"),
    ("schedule --replicas 3,x", "--replicas 3,x: expected a number for each stage, such as 7,1", ""),
    ("schedule plan.json --replicas 3,1", "2 of a plan file, --replicas and --placement were given", "for example"),
    (
        "profile vgg16 --batch 8 --device titanv",
        "no device is named 'titanv'; ready-made: ",
        "give one of these names",
    ),
    ("profile vgg16 --batch eight --device titan-v", "--batch is 'eight': expected whole numbers such as", ""),
    ("profile vgg16 --batch 8,0 --device titan-v", "--batch has 0: expected 1 or more", ""),
    ("simulate mlp --batch 8 --precision fp8", "--precision is 'fp8': expected one of fp32, bf16, fp16", ""),
    ("simulate mlp --batch 8 --assume-kind v100", "--assume-kind v100 goes with a profile file", "leave it out"),
    ("cluster --workers 0", "--workers is 0: expected 1 or more", ""),
    ("cluster titan-v-8 --workers 3", "--workers counts workers on this machine, not on titan-v-8", "leave one"),
    ("profile tiny-cnn --device cpu --batch 8 --workers 0", "--workers is 0: expected 1 or more", ""),
    ("data make new --format zip", "--format is 'zip': expected one of folder, ofrecord, tar", ""),
    ("train tiny-cn --device cpu --batch 8", "no model is called 'tiny-cn'", "did you mean tiny-cnn"),
    ("train tiny-cnn --batch 8 --device gpu", "--device is 'gpu': expected 'cpu' or 'cuda'", ""),
    (
        "train tiny-cnn --device cpu --batch 8 --microbatches 9",
        "--microbatches is 9, but the batch has 8 rows",
        "fewer",
    ),
    (
        "train tiny-cnn --device cpu --data nowhere",
        "--data nowhere: nowhere is not a directory",
        "a directory of images",
    ),
    (
        "train tiny-cnn --device cpu --plan plan.json",
        "plan.json is for vgg16 with layers conv1_1 … loss, not for tiny-cnn",
        "`stagewright plan`",
    ),
    (
        "train tiny-cnn --device cpu --placement 0:0,0:1 --nodes a,b",
        "--nodes a,b names 2 hosts, but the placement uses 1",
        "change --placement",
    ),
    ("train tiny-cnn --device cpu --decay-epochs 30,x", "--decay-epochs is '30,x': expected whole numbers", ""),
    (
        "train tiny-cnn --device cpu --recipe resnet",
        "no recipe is named 'resnet'; ready-made: alexnet, resnet50, vgg16",
        "give one of these names",
    ),
    ("rehearse tiny-cnn --batch 8", "a rehearsal is on the hosts of a file or on slices", "give --cluster or --slices"),
    ("bench nothing --list", "no suite is named 'nothing'; ready-made: ", "give one of these names"),
    ("bench compare A", "compare takes two folders, not 1", "stagewright bench compare A B"),
    ("export nowhere -o model.bin", "model.bin: the ending '.bin' says no format", "use .safetensors"),
    ("doctor nowhere", "nowhere is no folder of a run", "give the folder named by --out"),
    ("report nowhere", "nowhere: no such folder", "give the folder"),
    ("train vgg16 --batch", "option '--batch' requires an argument", "see `stagewright train --help`"),
    ("train vgg16 --batch=twelve", "--batch is 'twelve': expected a whole number", "see `stagewright train --help`"),
    ("train tiny-cnn --learning-rate fast", "--learning-rate is 'fast': expected a number", "--help"),
    ("train tiny-cnn --learning-rate -1", "--learning-rate is -1.0: expected 0 or more", ""),
    ("train tiny-cnn --batch 8 --batch-per-device 4", "--batch and --batch-per-device are both given", "leave one"),
    ("train tiny-cnn --ratio 3:1 --cut fc1", "--ratio and --cut are both given", "leave one of them out"),
    (
        "train tiny-cnn --device cpu --batch 8 --placement 0:0.0:1 --cut fc9",
        "--cut fc9: the model has no such layer",
        "layers: fc1, fc2",
    ),
    ("train tiny-cnn --device cpu --placement 0-3", "placement part '0-3': expected host:device", "write stages as"),
    ("train tiny-cnn --device cpu --placement 0:3-1", "placement part '0:3-1' counts down: write 0:1-3", ""),
    (
        "train tiny-cnn --device cpu --placement 0:0.0:1 --ratio 3:x",
        "ratio '3:x': expected positive numbers separated by colons, such as 11:7",
        "",
    ),
    (
        "train tiny-cnn --device cpu --placement 0:0.0:1 --ratio 1:2:3",
        "--ratio 1:2:3 makes 3 stages, but the placement has 2",
        "give as many stages to both",
    ),
    ("train tiny-cnn --optimizer adamm", "--optimizer is 'adamm': expected one of sgd, adam, adamw", ""),
    ("train tiny-cnn --decay cosin", "--decay is 'cosin': expected one of none, cosine, linear", ""),
    ("train tiny-cnn --device cpu --decay step", "--decay step does not say when the rate falls", "--decay-epochs 30"),
    ("train tiny-cnn --log-format xml", "--log-format is 'xml': expected one of text, json, original", ""),
    ("train tiny-cnn --stepps 3", "no such option: --stepps (Possible options: ", "--help"),
    ("train tiny-cnn --resume auto --device cpu", "--resume auto looks for checkpoints in the folder", "name it with"),
    ("train tiny-cnn --resume nowhere --device cpu", "--resume nowhere: there is no such folder", "use auto"),
    ("train tiny-cnn --config nowhere.yaml", "--config nowhere.yaml: No such file or directory", "give the path"),
    (
        "train tiny-cnn --config plan.json",
        "plan.json: key format is 'stagewright.plan': expected 'stagewright.config'",
        "it holds a plan, and a config is wanted",
    ),
    (
        "train tiny-cnn --device cpu --plan nowhere.json",
        "--plan nowhere.json: No such file or directory",
        "give the path of a file that is there",
    ),
    ("train tiny-cnn --device cpu --out plan.json", "plan.json is a file", "name a folder"),
    ("train tiny-cnn --checkpoint-every 0", "--checkpoint-every is 0: expected 1 or more", ""),
    ("train tiny-cnn --device cpu --replan", "--replan goes on from the last checkpoint", "add --checkpoint-every N"),
    ("train tiny-cnn --device cpu --nnodes 4:2", "--nnodes is '4:2': expected the least and the most hosts", ""),
    ("train tiny-cnn --device cpu --nnodes 2:4", "--nnodes 2:4 is for several hosts", "name them with --nodes"),
    ("train tiny-cnn --nnodes 2 --replan --nodes a,b", "--nnodes goes on with the hosts that are there", "one of them"),
    ("train tiny-cnn --lora-alpha 3", "--lora-alpha is given, but no --lora", "add --lora RANK"),
    ("train python:nowhere.py:model --device cpu", "python:nowhere.py:model: there is no file", "write python:FILE.py"),
    (
        "train python:nowhere.py --device cpu",
        "python:nowhere.py names no function of a file",
        "python:FILE.py:FUNCTION",
    ),
    ("train hf:nowhere --device cpu", "hf:nowhere is no folder", "give the path of a folder"),
    (
        "train tiny-cnn --device cpu --placement 1:0",
        "--placement 1:0 names host 1, and only host 0, this machine, is here",
        "name the hosts with --nodes",
    ),
    (
        "train tiny-cnn --device cpu --batch 8 --epoch-images 4 --epochs 1",
        "an epoch of synthetic has 4 images, fewer than the batch of 8",
        "use a smaller --batch",
    ),
    (
        "train tiny-cnn --device cpu --data text:nowhere",
        "tiny-cnn takes rows of shape (3, 32, 32), not tokens",
        "use a",
    ),
    ("train tiny-cnn alexnet", "got unexpected extra argument(s) (alexnet)", "see `stagewright train --help`"),
    ("simulate vgg16 --cluster titan-v-8 --batch 8 --bandwidth x", "--bandwidth 'x': expected factors such as x2", ""),
    (
        "simulate vgg16 --cluster titan-v-8 --batch 8,16 --devices 1,2",
        "more than one of --batch, --bandwidth and --devices has several values",
        "sweep one at a time",
    ),
    ("simulate plan.json --cluster titan-v-8 --devices 2", "--devices is for data parallelism", "leave --placement"),
    ("simulate vgg16 --batch 8 --placement 0:0,0:0", "placement '0:0,0:0' names 0:0 twice in one stage", ""),
    ("cluster --device v100", "--device, --rate and --decode go with --topology", "edit the cluster file instead"),
    ("rehearse tiny-cnn --cluster hosts-4 --device cuda", "--device is 'cuda': emulated hosts compute", "--slices N"),
    ("rehearse tiny-cnn --cluster hosts-4 --rate 1gbit", "--rate goes with --slices", "into the cluster file"),
    ("bench pipedream --only nothing-*", "--only 'nothing-*' matches no case of pipedream", "--list"),
    ("export plan.json -o x.safetensors", "plan.json: no good checkpoint was found", "train with --checkpoint-every"),
    ("data inspect plan.json", "plan.json is not a directory", "give a directory of images"),
    ("data tokens nowhere new --tokenizer nowhere", "nowhere does not exist", "give a text file"),
    ("models --layers", "--layers needs the name of a model", "for example: stagewright models vgg16 --layers"),
    ("doctor .", ". is no folder of a run: it has no schedule.json", "give the folder named by --out"),
    ("report .", ". holds no record.json", "run `stagewright train"),
    ("report . --watch --port 99999", "--port is 99999: expected", ""),
]
"""What is typed, what is said of it, and the way out; where that is empty, the first line has it."""


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan of VGG16 in it."""
    folder = tmp_path_factory.mktemp("mistakes")
    words = "plan vgg16 --cluster titan-v-8 --batch 64 --placement 0:0-6.0:7 --cut fc1 --no-simulate -o"
    with pytest.raises(SystemExit):
        main([*words.split(), str(folder / "plan.json")])
    return folder


def test_there_are_sixty_of_them() -> None:
    assert len({line for line, _, _ in MISTAKES}) >= 60


INTERNAL = (
    "Traceback",
    "Error:",
    "RecipeFile",
    "Settings",
    "PlanOptions",
    "Errno",
    "NoneType",
    "fault of stagewright",
    "Input should",
)


@pytest.mark.parametrize(("line", "what", "todo"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_a_mistake_is_a_line_or_two_and_status_2(
    line: str, what: str, todo: str, run: Run, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(where)
    status, out, err = run(*line.split())
    first, *others = err.splitlines()
    assert (status, out) == (2, "")
    assert first.startswith("error: ")
    assert what in first
    assert len(others) <= 1
    assert all(other.startswith("       ") for other in others)
    assert todo in "".join(others)
    assert not [word for word in INTERNAL if word in err]
    assert [path.name for path in where.iterdir()] == ["plan.json"], "nothing was begun"
