"""The comparison of processes that share a model before they load it, and their required number."""

import shutil

import pytest
import torch

from lineate.generation.job import join_job, working
from lineate.generation.ranks import about_checkpoint, about_process
from lineate.models import HybridLM, preset
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.small_models import random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "one"
    tokenizer = chat_tokenizer()
    random_model(preset("tiny", vocab_size=tokenizer.vocab_size)).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def about(folder) -> tuple[str, str]:
    return about_checkpoint(str(folder))["checkpoint"]


def test_a_copy_under_another_name_is_the_same_checkpoint(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "two")
    (own, shown), (other, other_shown) = about(folder), about(tmp_path / "two")
    assert own == other
    assert shown == f"one ({own[:12]})" and other_shown == f"two ({own[:12]})"


def train(folder) -> None:
    model = HybridLM.from_pretrained(folder, progress=False)
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(1.001)
    model.save_pretrained(folder)


def change_config(folder) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"norm_eps": 1e-06', '"norm_eps": 1e-05'))


def change_tokenizer(folder) -> None:
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")


@pytest.mark.parametrize("change", [train, change_config, change_tokenizer])
def test_another_checkpoint_is_noticed(folder, tmp_path, change):
    """Trained weights have the same header and size as before; nearly all of their bytes differ."""
    shutil.copytree(folder, tmp_path / "one")
    change(tmp_path / "one")
    assert about(folder)[0] != about(tmp_path / "one")[0]


def test_what_is_compared_of_a_process():
    said = about_process(torch.device("cpu"))
    assert said["version of torch"] == (str(torch.__version__),) * 2
    assert set(said) == {"version of lineate", "version of torch", "processor", "number of threads"}


@pytest.mark.parametrize(
    ("tensor", "size", "folder", "message"),
    [
        (2, None, "x", "got 2 and WORLD_SIZE is not set; start them with torchrun --nproc-per-node 2 and --tensor 2"),
        (1, 4, "x", "got 1 and WORLD_SIZE = 4; start them with torchrun --nproc-per-node 4 and --tensor 4"),
        (4, 2, "x", "got 4 and WORLD_SIZE = 2; start them with torchrun --nproc-per-node 4 and --tensor 4"),
        (2, 2, None, "--tensor needs the folder of a model"),
    ],
)
def test_the_number_of_processes_must_be_the_ranks(tensor, size, folder, message, monkeypatch):
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", size)):
        if size is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match=message):
        join_job(tensor, "cpu", folder, {})


def test_one_process_has_the_model_to_itself(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_job(1, "cpu", None, {}) is None
    with working(None):
        pass
