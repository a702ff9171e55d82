"""Reading models: the same weights from every format; whatever is wrong is one clear error."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs kvcatch[engine]")
gguf = pytest.importorskip("gguf", reason="needs kvcatch[engine]")
pytest.importorskip("safetensors", reason="needs kvcatch[engine]")

import tiny_model as tiny  # noqa: E402
from model_driver import generate  # noqa: E402
from torch_backend import TorchBackend  # noqa: E402

from kvcatch import InvalidArgument  # noqa: E402
from kvcatch.errors import ConfigError  # noqa: E402
from kvcatch.models.config import LlamaConfig  # noqa: E402
from kvcatch.models.dequantise import read_tensor  # noqa: E402
from kvcatch.models.errors import ModelError  # noqa: E402
from kvcatch.models.gguf import GGUFFile  # noqa: E402
from kvcatch.models.llama import LlamaModel, LlamaWeights  # noqa: E402
from kvcatch.models.load import load_model, read_shape  # noqa: E402
from kvcatch.models.precision import Precision  # noqa: E402
from kvcatch.models.tokenizer import tokenizer_from_gguf  # noqa: E402
from kvcatch.models.weights import halves_first  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcatch.models.load import LoadedModel

PROMPTS = [[5, 9, 100, 7], [42], list(range(3, 60))]


def logits(loaded: LoadedModel) -> torch.Tensor:
    runs = generate(loaded.model, TorchBackend(), PROMPTS, 3, chunk=9)
    return torch.stack([row for run in runs for row in run.logits])


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny.hf_tensors())


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny_gguf: Path) -> Any:
    return tokenizer_from_gguf(GGUFFile(tiny_gguf))._tokenizer


@pytest.fixture
def make_folder(tmp_path: Path, tiny_tokenizer: Any) -> Callable[..., Path]:
    def make(tensors: dict[str, Any] | None = None, *, shards: int = 1, **changes: Any) -> Path:
        return tiny.write_folder(
            tmp_path / f"folder{len(list(tmp_path.iterdir()))}",
            tiny.hf_tensors() if tensors is None else tensors,
            tiny.hf_config(**changes),
            tiny_tokenizer,
            shards=shards,
        )

    return make


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_folder_and_gguf_give_the_same_logits(
    tmp_path: Path, make_folder: Callable[..., Path], shards: int, tied: bool
) -> None:
    tensors = tiny.hf_tensors(tied=tied)
    one = load_model(
        make_folder(tensors, shards=shards, tie_word_embeddings=tied), precision="float32"
    )
    other = load_model(tiny.write_gguf(tmp_path / "x.gguf", tensors), precision="float32")
    assert one.config.tie_embeddings is other.config.tie_embeddings is tied
    assert one.config.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert torch.equal(logits(one), logits(other))


def test_tied_head_is_used_and_a_separate_one_too(make_folder: Callable[..., Path]) -> None:
    tensors = tiny.hf_tensors(tied=False)
    own = logits(load_model(make_folder(tensors, tie_word_embeddings=False), precision="float32"))
    tied = logits(load_model(make_folder(tensors), precision="float32"))
    assert (own - tied).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_dequantised_as_the_gguf_package_does(tmp_path: Path, kind: str) -> None:
    tensors = tiny.hf_tensors()
    file = GGUFFile(tiny.write_gguf(tmp_path / "x.gguf", tensors, quantised=kind))
    for name, info in file.tensors.items():
        assert info.dtype == (kind if len(info.shape) == 2 else "F32")
        raw = file.bytes_of(name).reshape(*info.shape[:-1], -1)
        wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[info.dtype])
        found = read_tensor(file, name)
        assert found.shape == info.shape
        assert np.array_equal(found.numpy(), wanted)
        assert found.is_contiguous()
    embedding = read_tensor(file, "token_embd.weight")
    assert (embedding - tensors["model.embed_tokens.weight"]).abs().max() < 0.1


def test_k_quants_are_read_through_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, arch="llama")
    raw = np.zeros((2, 210), np.uint8)
    raw[:, -2:] = np.array([1.0], np.float16).view(np.uint8)  # the block's scale
    raw[:, 192:208] = 1  # the scales of 16 weights each
    writer.add_tensor("t", raw, raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_tensor(GGUFFile(path), "t")
    assert found.shape == (2, 256)
    assert (found == -32).all()  # code 0 stands for -32


def test_halves_first_undoes_what_the_converter_does() -> None:
    rows = torch.arange(2 * 6)[:, None].float()
    stored = rows.reshape(2, 2, 3, 1).swapaxes(1, 2).reshape(12, 1)
    assert stored[:6, 0].tolist() == [0, 3, 1, 4, 2, 5]
    assert torch.equal(halves_first(stored, 2), rows)


def test_rope_divisors_of_a_gguf_file_are_used(tmp_path: Path) -> None:
    tensors = tiny.hf_tensors()
    halved = {**tensors, "rope_freqs.weight": torch.full((tiny.HEAD_DIM // 2,), 2.0)}
    one = load_model(tiny.write_gguf(tmp_path / "a.gguf", halved), precision="float32")
    scaled = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    other = load_model(
        tiny.write_gguf(tmp_path / "b.gguf", tensors, metadata=scaled), precision="float32"
    )
    plain = load_model(tiny.write_gguf(tmp_path / "c.gguf", tensors), precision="float32")
    assert torch.equal(logits(one), logits(other))
    assert (logits(one) - logits(plain)).abs().max() > 1e-3


def test_llama3_rope_keeps_short_and_divides_long_wavelengths() -> None:
    """Llama 3.1's numbers; both borders and the middle worked out by hand."""
    config = LlamaConfig.from_hf(
        tiny.hf_config(
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        ),
        "x",
    )
    turns = np.array([100.0, 4.0, 2.5, 1.0, 0.5])  # of a pair over 8,192 tokens
    frequencies = turns * 2 * np.pi / 8192
    kept = config.scale_frequencies(frequencies) / frequencies
    assert kept == pytest.approx([1, 1, 0.5 + 0.5 / 8, 1 / 8, 1 / 8])


def test_new_and_old_spelling_of_rope_are_the_same() -> None:
    old = tiny.hf_config(rope_theta=7e4, rope_scaling={"type": "linear", "factor": 4})
    new = tiny.hf_config(
        rope_theta=None,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 7e4},
    )
    assert LlamaConfig.from_hf(old, "x") == LlamaConfig.from_hf(new, "x")
    assert LlamaConfig.from_hf(new, "x").rope_theta == 7e4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "qwen3"}, "architecture 'qwen3' is not run here"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "must be positive"),
        ({"rope_scaling": 3}, "rope_scaling = 3: not an object"),
        ({"num_key_value_heads": 3}, "must divide"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "must divide"),
        ({"head_dim": 15}, "even"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1"),
    ],
)
def test_config_refusals(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        LlamaConfig.from_hf(tiny.hf_config(**changes), "some/config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not run here"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"split.count": 3}, "split.count"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"llama.block_count": None}, "block_count"),
        ({"llama.block_count": 3}, "lacks tensor blk.2"),
        ({"llama.block_count": 1}, "has tensor blk.1"),
        ({"llama.attention.head_count": 2}, "64 query and 32 key rows"),
        ({"llama.feed_forward_length": 95}, "gate_up has shape"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama'"),
        ({"tokenizer.ggml.pre": "falcon"}, "falcon"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [*tiny.TOKENS[:-1], "a"]}, "twice"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.merges": ["a never"]}, "do not fit"),
        ({"tokenizer.ggml.merges": ["aa"]}, "not two tokens"),
        ({"tokenizer.ggml.eos_token_id": 99999}, "99999"),
        ({"tokenizer.ggml.tokens": [*tiny.TOKENS, "extra"],
          "tokenizer.ggml.token_type": [1] * (len(tiny.TOKENS) + 1)}, "tokens in the tokenizer"),
    ],
)  # fmt: skip
def test_gguf_refusals(tmp_path: Path, metadata: dict[str, Any], said: str) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", tiny.hf_tensors(), metadata=metadata)
    with pytest.raises(InvalidArgument, match=said) as caught:
        load_model(path, precision="float32")
    assert "\n" not in str(caught.value)


def test_gguf_with_a_bias_or_without_embedding_is_refused(tmp_path: Path) -> None:
    tensors = tiny.hf_tensors()
    biased = {**tensors, "model.layers.0.self_attn.v_proj.bias": torch.zeros(32)}
    with pytest.raises(ModelError, match="which a Llama model does not have"):
        load_model(tiny.write_gguf(tmp_path / "a.gguf", biased))
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(ModelError, match="lacks tensor token_embd"):
        read_shape(tiny.write_gguf(tmp_path / "b.gguf", tensors))


def test_bos_is_prepended_where_the_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    tiny.write_gguf(path, tiny.hf_tensors(), metadata={"tokenizer.ggml.add_bos_token": True})
    tokenizer = tokenizer_from_gguf(GGUFFile(path))
    assert tokenizer.encode("aab")[0] == 0
    assert tokenizer.encode("aab", add_special_tokens=False) == tokenizer.encode("aab")[1:]
    assert tokenizer.eos_ids == {0, 1}  # <|endoftext|> ends too
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidArgument, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert tokenizer.decode(tokenizer.encode("a user_defined b")) == "a user_defined b"
    assert len(tiny.TOKENS) - 1 in tokenizer.encode("a user_defined b")


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm", "gpt-2"])
def test_pre_tokenizers_differ_where_they_should(tmp_path: Path, pre: str) -> None:
    path = tmp_path / "x.gguf"
    tiny.write_gguf(path, tiny.hf_tensors(), metadata={"tokenizer.ggml.pre": pre})
    tokenizer = tokenizer_from_gguf(GGUFFile(path))
    pieces = [
        piece
        for piece, _ in tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str("I'M 12345  6!\n\nx")
    ]
    assert (
        pieces
        == {
            "llama-bpe": ["I", "'M", "Ġ", "123", "45", "Ġ", "Ġ", "6", "!ĊĊ", "x"],
            "smollm": ["I", "'", "M", "Ġ", "1", "2", "3", "4", "5", "ĠĠ", "6", "!", "Ċ", "Ċ", "x"],
            "gpt-2": ["I", "'", "M", "Ġ12345", "Ġ", "Ġ6", "!", "Ċ", "Ċ", "x"],
        }[pre]
    )


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path / "none"):
        with pytest.raises(ModelError, match=r"none.*No such file"):
            load_model(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        load_model(tmp_path / "empty")


def test_every_truncation_is_refused(tmp_path: Path, tiny_gguf: Path) -> None:
    data = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(64), *range(64, len(data) - 1, 1999), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf: .*(truncated|no GGUF file)") as caught:
            GGUFFile(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("at", "new", "said"),
    [
        (0, b"GGML", "starts with b'GGML'"),
        (0, b"PK\3\4", "starts with"),
        (4, b"\1\0\0\0", "version 1 is not read"),
        (4, b"\0\0\0\3", "version 50331648"),
        (8, b"\xff" * 8, "number of tensors"),
        (16, b"\xff" * 8, "number of metadata entries"),
    ],
)
def test_damaged_header(tmp_path: Path, tiny_gguf: Path, at: int, new: bytes, said: str) -> None:
    data = bytearray(tiny_gguf.read_bytes())
    data[at : at + len(new)] = new
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=said):
        GGUFFile(path)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(hits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_damage_in_the_header_is_an_error_or_harmless(
    tmp_path: Path, tiny_gguf: Path, hits: list[tuple[float, int]]
) -> None:
    data = bytearray(tiny_gguf.read_bytes())
    header = GGUFFile(tiny_gguf).tensors["token_embd.weight"].offset
    for where, value in hits:
        data[int(where * (header - 1))] = value
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    said = ""
    try:
        file = GGUFFile(path)
        tokenizer_from_gguf(file)
        for name in file.tensors:
            read_tensor(file, name)
    except InvalidArgument as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize("shards", [1, 2])
def test_damaged_folders(make_folder: Callable[..., Path], shards: int) -> None:
    def broken(change: Callable[[Path], object]) -> str:
        folder = make_folder(shards=shards)
        change(folder)
        with pytest.raises(InvalidArgument) as caught:
            load_model(folder, precision="float32")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def weights(folder: Path) -> Path:
        return sorted(folder.glob("*.safetensors"))[0]

    def cut(folder: Path) -> None:
        path = weights(folder)
        path.write_bytes(path.read_bytes()[:-10])

    assert "damaged" in broken(cut)
    assert "damaged" in broken(lambda folder: weights(folder).write_bytes(b"PK\3\4 not this"))
    assert "no such file" in broken(lambda folder: weights(folder).unlink())
    assert "not JSON" in broken(lambda folder: (folder / "config.json").write_text("{"))
    assert "not a JSON object" in broken(lambda folder: (folder / "config.json").write_text("[]"))
    assert "tokenizer.json: no such" in broken(lambda folder: (folder / "tokenizer.json").unlink())
    assert "damaged" in broken(lambda folder: (folder / "tokenizer.json").write_text("{}"))
    if shards == 2:
        index = "model.safetensors.index.json"
        assert "damaged" in broken(lambda folder: (folder / index).write_text("[1]"))
        for name in ("../x.safetensors", "/etc/passwd", ""):
            places = json.dumps({"weight_map": {"model.norm.weight": name}})
            said = broken(lambda folder, text=places: (folder / index).write_text(text))
            assert "not a file of the same folder" in said
        lost = shutil.copyfile
        assert "no such file" in broken(
            lambda folder: (lost(weights(folder), folder / "y"), weights(folder).unlink())
        )


def test_a_folder_that_lacks_or_has_tensors(make_folder: Callable[..., Path]) -> None:
    tensors = tiny.hf_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    with pytest.raises(ModelError, match=r"lacks tensor model\.layers\.1\.mlp.* and 1 more"):
        load_model(make_folder(tensors))
    tensors = {**tiny.hf_tensors(), "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    with pytest.raises(ModelError, match="does not have"):
        load_model(make_folder(tensors))
    with pytest.raises(ModelError, match=r"lacks tensor lm_head\.weight"):
        load_model(make_folder(tie_word_embeddings=False))
    rotary = {**tiny.hf_tensors(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    load_model(make_folder(rotary))  # old checkpoints have it; it is computed


def test_weights_of_other_shapes_are_refused(make_folder: Callable[..., Path]) -> None:
    tensors = tiny.hf_tensors()
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 95)
    with pytest.raises(InvalidArgument, match=r"layer 1: down has shape \[64, 95\]"):
        load_model(make_folder(tensors))
    config = read_shape(make_folder())
    empty = LlamaWeights(torch.zeros(len(tiny.TOKENS), 64), [], torch.zeros(64))
    with pytest.raises(InvalidArgument, match="0 layers of weights"):
        LlamaModel(config, empty, Precision("float32", "plain", "a test"))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("matmul", ["plain", "packed"])
def test_every_precision_runs_and_agrees(
    make_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    matmul: str,
) -> None:
    folder = make_folder()
    wanted = logits(load_model(folder, precision="float32"))
    monkeypatch.setattr("kvcatch.models.precision._can_pack", lambda: matmul == "packed")
    loaded = load_model(folder, precision=precision)
    assert (loaded.precision.weights, loaded.precision.matmul) == (precision, matmul)
    assert f"{precision} weights, {matmul} matmul" in str(loaded)
    worst = float((logits(loaded) - wanted).abs().max())
    assert worst < (1e-4 if precision == "float32" else 0.3)


def test_a_step_without_logit_rows_still_writes(make_folder: Callable[..., Path]) -> None:
    """The last chunk but one of a prompt asks for no logits; the next step builds on what it wrote."""
    loaded = load_model(make_folder(), precision="float32")
    whole = generate(loaded.model, TorchBackend(), [PROMPTS[2]], 1)[0]
    chunked = generate(loaded.model, TorchBackend(), [PROMPTS[2]], 1, chunk=50)[0]
    assert torch.allclose(whole.logits[0], chunked.logits[0], atol=1e-4)
