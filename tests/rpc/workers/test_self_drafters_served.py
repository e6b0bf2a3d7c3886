"""A real tiny target that drafts with its own layers, through the services: text, what is told, refusals."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from stack import in_process_stack  # noqa: E402
from tiny_heads import LAYERS, VOCAB, write_target  # noqa: E402

from outrider.client import Client  # noqa: E402
from outrider.errors import InvalidArgument  # noqa: E402
from outrider.lm.exit_block import new_block  # noqa: E402
from outrider.lm.loading import load_model  # noqa: E402
from outrider.settings import TargetWorkerSettings  # noqa: E402
from target_worker.heads import Heads  # noqa: E402

EXIT_LAYER = 2
PROMPT = [5, 9, 11, 30]
RULES = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.8, "seed": 3, "acceptance": "coupled"},
}


def write_exit(folder: Path, target: Path, layer: int = EXIT_LAYER) -> Path:
    """The target's own layer and last norm: it adds little there, so that the adapter is often right."""
    model = transformers.LlamaForCausalLM.from_pretrained(target)
    block = new_block(model.config, layer)
    block.layers[0].load_state_dict(model.model.layers[layer].state_dict())
    block.norm.load_state_dict(model.model.norm.state_dict())
    described = load_model(TargetWorkerSettings(model=str(target), num_threads=1)).description
    about = {
        "kind": "exit",
        "exit_layer": layer,
        "target_model": described.model,
        "target_fingerprints": {described.dtype: described.model_fingerprint},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"outrider": about}))
    save_file({**block.state_dict(), "draft_ids": torch.arange(2, VOCAB - 2)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("self")
    target = write_target(base / "target")
    return target, write_exit(base / "exit", target), write_exit(base / "later", target, EXIT_LAYER + 1)


@pytest.mark.parametrize("heads", [("EXIT", "skip"), ("early=EXIT", "skip:2;3")], ids=["searched", "named"])
async def test_text_is_that_of_plain_decoding_and_what_drafts_is_told(folders, heads):
    target, adapter, _ = folders
    heads = tuple(head.replace("EXIT", str(adapter)) for head in heads)
    worker = {"heads": heads, "num_threads": 1}
    async with in_process_stack(str(target), None, target_worker=worker) as stack, Client(stack.address) as client:
        names = {"exit", "skip"} if heads[1] == "skip" else {"early", "skip"}
        assert names <= {*(await client.model_info()).drafters}
        for options in RULES.values():
            plain = await client.complete(PROMPT, max_tokens=40, num_speculative_tokens=0, **options)
            assert plain.speculation.num_draft_tokens == 0
            for name in names:
                for gamma in (1, 4):
                    answer = await client.complete(
                        PROMPT, max_tokens=40, drafter=name, num_speculative_tokens=gamma, **options
                    )
                    assert answer.token_ids == plain.token_ids
                    assert answer.speculation.num_draft_tokens > 0, "INCONCLUSIVE: nothing was drafted"
                    assert answer.speculation.num_accepted_draft_tokens > 0, "INCONCLUSIVE"


def prepared(folders, *heads):
    target = folders[0]
    settings = TargetWorkerSettings(model=str(target), num_threads=1, heads=heads)
    equipment = Heads(settings)
    equipment.prepare(load_model(settings))
    return equipment


def test_what_is_loaded_names_its_layers(folders):
    told = prepared(folders, str(folders[1]), "skip").target_drafters
    assert [(one.name, one.kind) for one in told] == [("exit", "exit"), ("skip", "skip")]
    layers = [int(layer) for layer in told[1].source.removeprefix("skip:").split(";")]
    assert layers
    assert set(layers) <= set(range(1, LAYERS - 1))
    assert told[0].num_parameters > 0


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        (("EXIT", "other=LATER"), "leaves after 3 layers, another one after 2"),
        (("skip:1", "other=skip:2"), "one skip"),
        (("skip:2;1",), "rising order"),
        ((f"skip:{LAYERS}",), "layers"),
    ],
)
def test_what_does_not_go_together_is_refused(folders, heads, words):
    heads = [head.replace("EXIT", str(folders[1])).replace("LATER", str(folders[2])) for head in heads]
    with pytest.raises(InvalidArgument, match=words) as error:
        prepared(folders, *heads)
    assert error.value.field == "heads"


def test_layers_of_a_toy_must_be_named():
    settings = TargetWorkerSettings(model="toy:vocab=8", heads=("skip",))
    with pytest.raises(InvalidArgument, match="must name its layers"):
        Heads(settings).prepare(load_model(settings))
