"""A byte-level BPE tokenizer rebuilt from the metadata of a GGUF file.

A GGUF names its pre-tokenizer instead of describing it; the patterns here are those of the models the names come from
(llama.cpp keeps the list).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from attrs import frozen
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.model.tokenizer import Tokenizer

__all__ = ["build_tokenizer"]

CONTROL, USER_DEFINED = 3, 4
SPECIAL_TOKEN_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# End of text, of a turn, and of a message: each ends a sample.
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@frozen(kw_only=True)
class PreTokenizerKind:
    """`digits`: the pattern of a run of digits, None for the splitting of GPT-2.

    `ignore_merges`: a word that is a token is taken whole, whether merges lead there or not.
    """

    digits: str | None = None
    single_digits: bool = False
    normalize_nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


PRE_TOKENIZER_KINDS = {
    "default": PreTokenizerKind(),
    "gpt-2": PreTokenizerKind(),
    "llama-bpe": PreTokenizerKind(digits=r"\p{N}{1,3}", ignore_merges=True, add_bos=True),
    "qwen2": PreTokenizerKind(digits=r"\p{N}", normalize_nfc=True),
    "smollm": PreTokenizerKind(single_digits=True),
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """None when the file carries no vocabulary.

    `metadata` holds plain Python values by GGUF key. Raises `UnsupportedModelError` for other tokenizers than
    byte-level BPE and for unknown pre-tokenizers, `CheckpointError` for metadata that contradicts itself.
    """
    if metadata.get("tokenizer.ggml.model", "no_vocab") in ("no_vocab", "none"):
        return None
    kind = pre_tokenizer_kind(metadata)
    tokens = string_list(metadata, "tokens")
    backend = build_backend(tokens, string_list(metadata, "merges"), kind)
    add_special_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type"))
    special_tokens = {
        name: tokens[token_id]
        for name, key in SPECIAL_TOKEN_KEYS.items()
        if (token_id := read_token_id(metadata, key, len(tokens))) is not None
    }
    if metadata.get("tokenizer.ggml.add_bos_token", kind.add_bos) and "bos_token" in special_tokens:
        prepend_bos(backend, special_tokens["bos_token"])
    eos_token_ids = [read_token_id(metadata, key, len(tokens)) for key in EOS_KEYS]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in eos_token_ids if token_id is not None)),
        chat_template=template if isinstance(template, str) else None,
    )


def pre_tokenizer_kind(metadata: Mapping[str, Any]) -> PreTokenizerKind:
    model = metadata["tokenizer.ggml.model"]
    if model != "gpt2":
        raise UnsupportedModelError(f"GGUF tokenizer {model!r} is not supported, only 'gpt2' (byte-level BPE)")
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZER_KINDS:
        raise UnsupportedModelError(
            f"GGUF pre-tokenizer {name!r} is not supported; supported are {', '.join(PRE_TOKENIZER_KINDS)}"
        )
    return PRE_TOKENIZER_KINDS[name]


def string_list(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"the GGUF file's tokenizer.ggml.{key} is missing or not a list of strings")
    return value


def build_backend(tokens: Sequence[str], merges: Sequence[str], kind: PreTokenizerKind) -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError("the GGUF file's vocabulary names a token twice")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        bpe = models.BPE(vocab, pairs, ignore_merges=kind.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"the GGUF file's merges do not fit its vocabulary: {error}") from error
    backend = tokenizers.Tokenizer(bpe)
    if kind.normalize_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = build_pre_tokenizer(kind)
    backend.decoder = decoders.ByteLevel()
    return backend


def build_pre_tokenizer(kind: PreTokenizerKind) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.digits is None)
    if kind.digits is not None:
        words = pre_tokenizers.Split(Regex(WORDS.format(digits=kind.digits)), behavior="isolated")
        return pre_tokenizers.Sequence([words, byte_level])
    if kind.single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def add_special_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: object) -> None:
    """Control and user-defined tokens are matched whole in a text; only control tokens are skipped in decoding."""
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError("the GGUF file's tokenizer.ggml.token_type does not give one type to each token")
    typed = list(zip(tokens, types, strict=True))
    control = [AddedToken(token, special=True, normalized=False) for token, kind in typed if kind == CONTROL]
    user_defined = [AddedToken(token, special=False, normalized=False) for token, kind in typed if kind == USER_DEFINED]
    backend.add_special_tokens(control)
    backend.add_tokens(user_defined)


def read_token_id(metadata: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{key}")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
        raise CheckpointError(f"the GGUF file's tokenizer.ggml.{key} {token_id!r} is outside its {vocab_size} tokens")
    return token_id


def prepend_bos(backend: tokenizers.Tokenizer, bos_token: str) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=[bos_token, "$A"], pair=None, special_tokens=[(bos_token, backend.token_to_id(bos_token))]
    )
