"""A decoder of transformers with its own static cache equals the eager model step by step."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import spangraph
from spangraph import SpannedOutput

from .decoders import BOS, BS, EOS, eager, restarts, run
from .toys import compiled

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 200


class Llama(nn.Module):
    """A greedy step of a small Llama: its token, and a row of logits that is as long as the token says."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=NUM_STEPS,
            initializer_range=0.6,  # so that it says something
        )
        net = LlamaForCausalLM(config).eval()
        net.generation_config = GenerationConfig(
            use_cache=True,
            cache_implementation="static",
            cache_config={"batch_size": BS, "max_cache_len": NUM_STEPS},
        )
        self.net = TorchExportableModuleWithStaticCache(net)
        self.register_buffer("token", torch.full((BS, 1), BOS))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("done", torch.zeros(BS, dtype=torch.bool))

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, restart: Tensor) -> SpannedOutput:
        first = torch.arange(BOS, BOS + BS).unsqueeze(1)
        self.token.copy_(torch.where(restart.unsqueeze(1), first, self.token))
        self.done.logical_and_(~restart)
        logits = self.net(input_ids=self.token, cache_position=self.position)[:, -1]
        token = logits.argmax(1).masked_fill(self.done, EOS)
        lengths = (token % 9).masked_fill(token == EOS, 0)
        spoken = {"token": token, "position": self.position.repeat(BS)}
        self.token.copy_(token.unsqueeze(1))
        self.done.logical_or_(token == EOS)
        self.position.add_(1)
        return SpannedOutput({"audio": logits[:, :8]}, {"audio": spangraph.from_lengths(lengths)}, spoken)


def _state(model: nn.Module) -> dict[str, Any]:
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def test_a_static_cache_is_advanced_as_eager_advances_it() -> None:
    """200 steps at depth 2: rows, row values, and the cache at the end, which transformers holds in objects too."""
    torch.manual_seed(1)
    model = Llama()
    reference = copy.deepcopy(model)
    inputs = restarts(NUM_STEPS)
    expected = eager(reference, inputs)
    tokens = torch.tensor([step.values["token"] for step in expected])
    assert 0 < (tokens == EOS).sum() < tokens.numel() / 2
    assert len(tokens.unique()) > 20
    for on in ("inline", "simulated"):
        run_model = copy.deepcopy(model)
        cache: Any = run_model.net.static_cache.layers[1].keys
        with compiled(run_model, on, depth=2) as run_:
            assert run(run_, inputs) == expected
        assert _state(run_model) == _state(reference)
        assert run_model.net.static_cache.layers[1].keys is cache
        assert cache.equal(run_model.net.key_cache_1)
