"""A transformers model whose decoder, head and cache are Terrazzo's. Importing this module imports transformers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from terrazzo.lowering import graphs
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import folders
from terrazzo.nn.architectures import Shape
from terrazzo.nn.config_fields import check_length
from terrazzo.nn.decoder import Decoder, positions_of
from terrazzo.nn.generation import NotFiniteError, check_temperature, end_tokens, finite
from terrazzo.nn.parallel import TensorParallel
from terrazzo.nn.transformers_cache import PAGE, TerrazzoCache
from terrazzo.ops import tensor_files, weights
from terrazzo.ops.attention.kv_cache import KVCache
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache
from transformers.generation import LogitsProcessor
from transformers.modeling_outputs import MoeModelOutputWithPast

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
    from transformers.generation.configuration_utils import GenerationMode
    from transformers.generation.utils import GenerateOutput
else:
    PreTrainedModel = object  # `class_of` adds the class of an architecture, which is one

REFUSED = ("output_hidden_states", "output_attentions", "output_router_logits")
"""What transformers' models return on demand, and these do not keep."""
_HOOKS = ("_hf_hook", "_old_forward")
"""What accelerate sets on a model that it offloads or spreads over devices."""
SINGLE = {"num_beams": 1, "assistant_model": None, "prompt_lookup_num_tokens": None, "assistant_early_exit": None}
"""Options of generation and their one value that is served: others take tokens of a sequence back."""


class Body(nn.Module):
    """In the place of LlamaModel and its like: a `Decoder` with their signature.

    Args:
        decoder: embedding, layers, norm. shape: see `architectures.shape_of`; of several ranks with the own heads.
        formats: of keys and values. ranks: those that share the model, None for one.
        max_tokens: of a sequence, for which caches that forward makes have room at first. config: transformers', for
            what it asks of outputs.
        static: float32 scales of keys and values for caches of static formats, of all layers.
    """

    def __init__(
        self,
        decoder: Decoder,
        shape: Shape,
        formats: tuple[str, str],
        max_tokens: int,
        config: PretrainedConfig | None = None,
        static: tuple[torch.Tensor | None, ...] = (None, None),
        ranks: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.decoder, self.shape, self.formats, self.max_tokens = decoder, shape, formats, max_tokens
        self.config, self.static = config, static

    @property
    def embed_tokens(self) -> nn.Embedding:
        return self.decoder.embed_tokens

    def new_cache(self, sequences: int, tokens: int) -> KVCache:
        """A cache for so many sequences of at most `tokens` tokens each, on the model's device."""
        pages = sequences * -(-tokens // PAGE)
        return KVCache(
            *self.formats, kv_heads=self.shape.kv_heads, head_dim=self.shape.head_dim, pages=pages, page_size=PAGE,
            sequences=sequences, max_tokens=tokens, layers=self.shape.layers, device=self.embed_tokens.weight.device,
            k_static=self.static[0], v_static=self.static[1],
        )  # fmt: skip

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: object,
    ) -> MoeModelOutputWithPast:
        """Hidden states [B, T, hidden] of the newest T columns of a padded batch; padding gets zeros.

        With a cache, steps of one token (T = 1) are one CUDA graph from the second one on, where tensors lie on a GPU.
        A mask is read on the host, which then waits for the device: leave it out where all new columns are tokens.

        Args:
            inputs_embeds: float [B, T, hidden], as `get_input_embeddings()` gives them, in the place of tokens.
            attention_mask: [B, columns], 0 where a column is padding, or None for none. Padding takes no room in the
                cache, and a row of which no new column counts pauses.
            position_ids: integers [B, T] or [1, T], which turn queries and keys; None counts each sequence's tokens.
                What a token attends to, windows included, goes by the order of tokens.
            past_key_values: a `TerrazzoCache`; None, or an empty cache of another kind, is replaced by one.
            cache: the name of past_key_values from transformers 5.24 on.

        Raises:
            ArgumentError: tokens that are no integers [B, T] of the vocabulary, lie on another device, or come beside
                embeddings; a mask of four dimensions, or in a graph that is captured; a cache of another kind that
                holds tokens, positions of another shape, outputs that are not kept (hidden states of layers,
                attention, router logits).
        """
        for name in REFUSED:
            if kwargs.get(name, getattr(self.config, name, False)):
                remedy = "leave it out, or use transformers' own model"
                raise ArgumentError(name, True, "is not kept: layers' sums stay inside of kernels", remedy)
        given = self._given(input_ids, inputs_embeds)
        rows, columns = given.shape[:2]
        held = self._cache(past_key_values if cache is None else cache, rows, columns, use_cache)
        mask = _newest(attention_mask, rows, columns)
        positions = _positions(position_ids, rows, columns)
        steps = given.is_cuda and columns == 1  # of tokens that the model made; nothing waits for the device
        if inputs_embeds is None and not steps and not _traced():
            _check_vocabulary(given if mask is None else given[mask], len(self.embed_tokens.weight))
        with torch.no_grad():
            h = None
            if columns == 1 and mask is None and inputs_embeds is None and use_cache is not False and not _traced():
                h = held.step(self, given[:, 0], None if positions is None else positions[:, 0])
            if h is None:
                batch = held.extend(columns, mask)
                pick = lambda x: x.flatten(0, 1) if mask is None else x[mask]
                if sum(batch.new):
                    h = self.decoder(pick(given), positions_of(batch) if positions is None else pick(positions), batch)
                else:  # padding alone
                    h = self.embed_tokens.weight.new_empty(0, self.embed_tokens.weight.shape[1])
        if mask is None:
            h = h.view(rows, columns, -1)
        else:
            h = h.new_zeros(rows, columns, h.shape[-1]).masked_scatter_(mask[..., None], h)
        return MoeModelOutputWithPast(last_hidden_state=h, past_key_values=held if use_cache is not False else None)

    def _given(self, tokens: torch.Tensor | None, embedded: torch.Tensor | None) -> torch.Tensor:
        """Tokens [B, T] or embeddings [B, T, hidden], whichever there is."""
        if (tokens is None) == (embedded is None):
            seen = "neither" if tokens is None else "both"
            raise ArgumentError("input_ids", seen, "or inputs_embeds must be given, and not both", "pass one of them")
        weight, name = self.embed_tokens.weight, "input_ids" if tokens is not None else "inputs_embeds"
        given, fits = tokens if tokens is not None else embedded, False
        if tokens is not None:
            fits = is_integer(given) and given.dim() == 2
            wanted, remedy = "integers [batch, tokens]", "tokenizer(texts, return_tensors='pt').input_ids is such"
        else:
            floats = isinstance(given, torch.Tensor) and given.is_floating_point()
            fits = floats and given.dim() == 3 and given.shape[2] == weight.shape[1]
            wanted = f"floats [batch, tokens, {weight.shape[1]}]"
            remedy = "model.get_input_embeddings()(input_ids) is such"
        if not fits or not given.numel():
            raise ArgumentError(name, described(given), f"must be {wanted}, of at least one token", remedy)
        if given.device != weight.device:
            raise ArgumentError(name, f"on {given.device}", f"the model is on {weight.device}", "move one of them")
        return given.long() if tokens is not None else given.to(weight.dtype)

    def _cache(self, given: Cache | None, rows: int, columns: int, use_cache: bool | None) -> TerrazzoCache:
        if isinstance(given, TerrazzoCache):
            if len(given.sequences) != rows:
                seen = f"{rows} rows beside {len(given.sequences)} sequences"
                raise ArgumentError("past_key_values", seen, "must be of this batch", "make a cache for each batch")
            return given
        if given is not None and int(given.get_seq_length()):
            remedy = "pass none: the model makes one"
            raise ArgumentError("past_key_values", type(given).__name__, "must be a TerrazzoCache", remedy)
        tokens = columns if use_cache is False else max(self.max_tokens, columns)
        return TerrazzoCache(self.new_cache(rows, tokens), rows, whole=True)


def is_integer(given: object) -> bool:
    """Whether it is a tensor of whole numbers."""
    return isinstance(given, torch.Tensor) and not (
        given.is_floating_point() or given.is_complex() or given.dtype == torch.bool or given.is_quantized
    )


def described(given: object) -> str:
    """Dtype and shape of a tensor, or the name of another object's type."""
    return f"{given.dtype} {list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__


def _newest(mask: torch.Tensor | None, rows: int, columns: int) -> torch.Tensor | None:
    """bool [B, columns] of the newest columns; None where all count."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        constraint = "must be [batch, columns] of ones and zeros: attention is causal"
        raise ArgumentError("attention_mask", described(mask), constraint, "leave it out, or pass the padding mask")
    if mask.shape[0] != rows or mask.shape[1] < columns:
        constraint = f"must be of {rows} rows and at least {columns} columns"
        raise ArgumentError("attention_mask", list(mask.shape), constraint, "pass the mask of all tokens so far")
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        constraint = "cannot be read while a graph is captured"
        raise ArgumentError("attention_mask", list(mask.shape), constraint, "leave it out: all new columns count then")
    newest = mask[:, -columns:].bool()
    return None if bool(newest.all()) else newest


def _positions(given: torch.Tensor | None, rows: int, columns: int) -> torch.Tensor | None:
    """Integers [B, T], or None."""
    if given is None:
        return None
    fits = is_integer(given) and given.dim() == 2 and given.shape[0] in (1, rows) and given.shape[1] == columns
    if not fits:
        seen, wanted = described(given), f"[{rows}, {columns}]"
        raise ArgumentError("position_ids", seen, f"must be integers {wanted}", "leave them out to count tokens")
    return given.expand(rows, columns)


def _check_vocabulary(tokens: torch.Tensor, count: int) -> None:
    """Refuse tokens that the embedding has no row for, which would end a GPU's context."""
    if tokens.numel():
        least, most = torch.stack(tokens.aminmax()).tolist()
        if least < 0 or most >= count:
            seen = least if least < 0 else most
            raise ArgumentError("input_ids", seen, f"tokens must be 0..{count - 1}", "use the tokenizer of this model")


def _traced() -> bool:
    """Whether a graph is being made around this call."""
    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class Causal(PreTrainedModel):
    """What a Terrazzo model has besides its transformers class."""

    model: Body
    lm_head: nn.Module

    @property
    def decoder(self) -> Decoder:
        """Embedding, layers and norm."""
        return self.model.decoder

    @property
    def ranks(self) -> TensorParallel | None:
        """Those that share the model, None for one."""
        return self.model.ranks

    def new_cache(self, sequences: int, tokens: int) -> KVCache:
        """See `Body.new_cache`."""
        return self.model.new_cache(sequences, tokens)

    @property
    def max_positions(self) -> int | None:
        """Tokens that a sequence may have, None where the config does not say."""
        return self.model.shape.positions

    assumed_end: int | list[int] | None = None
    """End token of the generation config that only the config's class names; None where the checkpoint states one."""

    def generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> torch.Tensor | GenerateOutput:
        """transformers' generate, for prompts that are padded on the left.

        Raises:
            ArgumentError: prompts that are no integers [B, T], or too long for the model with what is generated; an
                attention_mask whose last column is padding: the next token would follow that. A temperature by which
                logits cannot be divided. Beams, guesses that are taken back, and transformers' quantized cache.
            NotFiniteError: logits of some rows are NaN or infinite, once the others have ended; failed rows have end
                tokens, or else token 0, from there on.
        """
        stated = kwargs.get("generation_config", args[0] if args else None) or self.generation_config
        asked = lambda name: kwargs.get(name, getattr(stated, name, None))
        for name, only in SINGLE.items():
            if asked(name) not in (only, None):
                remedy = f"generate with {name}={only}"
                raise ArgumentError(name, _brief(asked(name)), "is not served", remedy)
        if asked("cache_implementation") == "quantized":
            remedy = 'load the model with kv="int8" or kv="int4", and leave this out'
            raise ArgumentError("cache_implementation", "quantized", "quantizes float keys and values", remedy)
        if asked("do_sample") and asked("temperature") is not None:
            check_temperature(asked("temperature"))
        mask, kwargs = kwargs.get("attention_mask"), dict(kwargs)
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.numel() and not bool(mask[:, -1].all()):
            remedy = "pass padding_side='left' to the tokenizer; terrazzo.generate needs no padding"
            seen = f"0 in the last column of row {int(mask[:, -1].bool().logical_not().nonzero()[0])}"
            raise ArgumentError("attention_mask", seen, "pads on the right, where the next token comes", remedy)
        embedded = kwargs.get("inputs_embeds")
        inputs = None if inputs is None else _rows("inputs", inputs, embedded is None)
        if kwargs.get("input_ids") is not None:
            kwargs["input_ids"] = _rows("input_ids", kwargs["input_ids"], embedded is None)
        given = next((x for x in (inputs, kwargs.get("input_ids"), embedded) if x is not None), None)
        if isinstance(given, torch.Tensor) and given.dim() > 1:
            longest = int(mask.sum(1).max()) if isinstance(mask, torch.Tensor) and mask.dim() == 2 else given.shape[1]
            check_length(longest, _new_tokens(stated, kwargs, given.shape[1]), self.max_positions)
        ends = end_tokens(asked("eos_token_id"))
        watch = _Finite(ends[0] if ends else 0)
        kwargs["logits_processor"] = [*(kwargs.get("logits_processor") or ()), watch]
        with _Draws() if asked("do_sample") and self.model.embed_tokens.weight.is_cuda else nullcontext():
            made = super().generate(inputs, *args, **kwargs)
        if rows := watch.rows():
            raise NotFiniteError(rows, made, self.decoder.embed_tokens.weight.dtype)
        return made

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: GenerationMode,
        batch_size: int, max_cache_length: int,
    ) -> Cache | None:  # fmt: skip
        """transformers' hook: caches that it makes have what a call needs. Without it they begin with `max_tokens`."""
        generation_config.cache_implementation = None  # ours serves in the place of each
        made = super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        for name in ("cache", "past_key_values"):  # by release
            held = model_kwargs.get(name)
            if isinstance(held, TerrazzoCache):
                held.ask(max_cache_length + 1)
            elif isinstance(held, Cache) and not held.get_seq_length():
                rows = batch_size * max(generation_config.num_return_sequences or 1, 1)
                model_kwargs[name] = TerrazzoCache(self.new_cache(rows, max_cache_length + 1), rows, whole=True)
        return made

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Causal:
        made = fn(torch.empty(0, dtype=torch.float16)).dtype
        if made not in (torch.float16, torch.bfloat16):
            seen, constraint = (
                str(made).removeprefix("torch."),
                "must be float16 or bfloat16, which packed layers multiply",
            )
            raise ArgumentError("dtype", seen, constraint, "cast what the model gives, or load the float model")
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOOKS:
            constraint = "would keep weights elsewhere, and kernels read them where they are"
            raise ArgumentError(
                "model", "accelerate's hooks", constraint, "load the model on one device: device='cuda:0'"
            )
        super().__setattr__(name, value)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: object, **kwargs: object
    ) -> nn.Embedding:
        """The embedding, whose number of tokens is fixed.

        Raises:
            ArgumentError: another number of tokens than the model has.
        """
        have = len(self.model.embed_tokens.weight)
        if new_num_tokens not in (None, have):
            constraint = f"must be {have}: the head and its table are packed for so many tokens"
            raise ArgumentError(
                "new_num_tokens", new_num_tokens, constraint, "resize the float model, then quantize it"
            )
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Refused but for the model's own embedding: forward reads the decoder's.

        Raises:
            ArgumentError: another embedding.
        """
        if value is not self.model.embed_tokens:
            constraint = "must be the model's own: layers read its table, which quantizing fixed"
            remedy = "copy numbers into get_input_embeddings().weight, or set it in the float model and quantize that"
            raise ArgumentError("value", type(value).__name__, constraint, remedy)

    def save_pretrained(self, save_directory: str | Path, max_shard_size: str = "5GB", **kwargs: object) -> None:
        """Write packed weights as they are, config and generation config: a folder that `terrazzo.load` reads.

        Tokenizer, chat template and the like are copied from the folder that the model was loaded from
        (`name_or_path`). transformers without Terrazzo refuses the folder.

        Args:
            max_shard_size: of a safetensors file.

        Raises:
            ArgumentError: a model of which this rank has only its own share; a folder that cannot be written.
        """
        if self.ranks is not None:
            constraint = f"has one of {self.ranks.world} shares of the model, and a folder holds all of it"
            raise ArgumentError("tensor_parallel", self.ranks.rank, constraint, "save what load gives without it")
        folder = weights.path_of(save_directory)
        with tensor_files.named(folders.WHERE, folder):
            folder.mkdir(parents=True, exist_ok=True)
        state = {f"decoder.{name}": t for name, t in self.decoder.state_dict().items()}
        tied = getattr(self.lm_head, "weight", None)
        if tied is None or tied.data_ptr() != self.decoder.embed_tokens.weight.data_ptr():
            state |= {f"lm_head.{name}": t for name, t in self.lm_head.state_dict().items()}
        state |= folders.static_state(*self.model.static) | folders.refusal_state()
        folders.write_state(folder, state, max_shard_size)
        self.config.dtype = self.decoder.embed_tokens.weight.dtype  # that of the files, after a cast
        packed = folders.packed_with(self.model.formats)
        facts = (self.config, packed, self.generation_config, self.name_or_path)
        folders.write_configs(folder, *facts, folders.WHERE, self.assumed_end)


class _Draws(TorchFunctionMode):
    """Inside, tokens are drawn while no other thread captures a graph: see `graphs.lock`."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with graphs.lock if func is torch.multinomial else nullcontext():
            return func(*args, **(kwargs or {}))


def _brief(value: object) -> int | str:
    """A value, or the name of an object's type."""
    return value if isinstance(value, int | str) else type(value).__name__


class _Finite(LogitsProcessor):
    """Notes rows whose scores are not finite, and takes the end token for them, so that they end alone.

    Args:
        end: that token.
    """

    def __init__(self, end: int) -> None:
        self.end, self.failed = end, None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        fine = finite(scores)
        self.failed = ~fine if self.failed is None else self.failed | ~fine
        ended = torch.full_like(scores[:1], -torch.inf)
        ended[:, self.end if 0 <= self.end < scores.shape[1] else 0] = 0
        return torch.where(fine[:, None], scores, ended)

    def rows(self) -> list[int]:
        """Numbers of the rows that failed; waits for the device."""
        return [] if self.failed is None else self.failed.nonzero()[:, 0].tolist()


def _rows(name: str, tokens: torch.Tensor, full: bool) -> torch.Tensor:
    """int64 [B, T] of any whole numbers; with embeddings beside them, not `full`, there may be none."""
    if not is_integer(tokens) or tokens.dim() != 2 or not len(tokens) or (full and not tokens.shape[1]):
        remedy = "tokenizer(texts, return_tensors='pt').input_ids is such; terrazzo.generate takes texts"
        constraint = "must be integers [batch, tokens], of at least one token"
        raise ArgumentError(name, described(tokens), constraint, remedy)
    return tokens.long()


def _new_tokens(stated: GenerationConfig, asked: dict[str, Any], columns: int) -> int:
    """How many tokens transformers' generate makes at most, by a generation config and what a call asks for."""
    for source in (asked.get, lambda name: getattr(stated, name, None)):
        if (new := source("max_new_tokens")) is not None:
            return new
        if (length := source("max_length")) is not None:
            return max(length - columns, 0)
    return 1  # by default it stops where the positions end
