#!/usr/bin/env python3
"""GMTS: reinforcement learning on the fifth of the sampled tokens that would move the model most.

A language model answers each question several times, a verifier calls each answer right or wrong, and the
policy gradient makes the tokens of better answers likelier. Most tokens hardly matter: their gradient is near
zero. Gradient Magnitude-based Token Selection (arXiv 2608.30632) estimates its size for each token,
    delta_t = |H_t * omega_t|     H_t: the policy's entropy at t     omega_t: the factor of grad log pi(y_t)
and trains on the 20% with the largest delta. Where this file leaves the paper: groups without signal (answers
all equally good) leave the batch before the ranking, for every selector alike; ranking and denominator are of
the whole batch, as in the paper's text (its code ranks inside each question and divides by all tokens);
`exact` puts the true norm of the logits' gradient in the place of H; one recipe for all, lr 1e-6 and no KL.
Shapes: P prompts, G answers to each, N = P*G, L prompt and T answer tokens, V vocabulary, D width, K chosen.
"""
import argparse, ast, contextlib, csv, functools, glob, hashlib, inspect, json, math, operator, os, random, re
import resource, runpy, shutil, signal, sys, time
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
import mpmath
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, set_seed

class BadInput(ValueError): """Something that the user can mend: one line on stderr and exit status 2."""
@contextlib.contextmanager
def explain(what):
    """Whatever fails inside is for the user to mend; `what` says where."""
    try: yield
    except Exception as error: raise BadInput(f"{what}: {str(error) or type(error).__name__}") from error
# ---- Configuration: the only source of settings. Each field is a flag; the demo has defaults of its own ----
SELECTORS = ("gmts", "entropy", "exact", "random", "all")
def flag(default, help, low=None, choices=None, demo=None):
    return field(default=default, metadata={"help": help, "low": low, "choices": choices, "demo": demo})
@dataclass
class Config:
    model: str = flag("demo", "hub name, local folder, or demo: a 242k-parameter adder made on the spot")
    data: str = flag("gsm8k", "gsm8k, math, demo, or a .jsonl or .json file with answers", demo="demo")
    eval_data: str = flag("", "the same to evaluate on; if empty, its own test set or a held-out tenth")
    prompt: str = flag("{question}\nPlease reason step by step, and put your final answer in \\boxed{}.\n",
                       "what the model is asked; {question} is put in", demo="{question}")
    reward: str = flag("", "FILE.py:FUNCTION, f(completion, answer) -> number; if empty, the verifier")
    select: str = flag("gmts", "what ranks the tokens", choices=SELECTORS)
    fraction: float = flag(0.2, "share of the tokens to train on", 0)
    prompts: int = flag(32, "questions a step (P), at least one a process", int(os.getenv("WORLD_SIZE", "1")))
    samples: int = flag(16, "answers to each question (G)", 2, demo=8)
    max_tokens: int = flag(512, "longest answer in tokens (T)", 1, demo=34)
    temperature: float = flag(1.0, "of sampling, and of evaluation with several samples", 1e-6)
    lr: float = flag(1e-6, "learning rate of AdamW", 0, demo=3e-4)
    lr_end: float = flag(1.0, "share of it that is left in the last step, after a linear decay", 0, demo=0.1)
    warmup: int = flag(10, "steps of linear warm-up", 0, demo=5)
    steps: int = flag(200, "rollouts to train on", 0, demo=300)
    updates: int = flag(1, "optimizer steps a rollout, each on a part of its groups", 1)
    beta: float = flag(0.0, "weight of the KL term against the initial model", 0)
    clip_low: float = flag(0.2, "the ratio is clipped below 1 - this", 0)
    clip_high: float = flag(0.28, "the ratio is clipped above 1 + this", 0)
    micro_tokens: int = flag(8192, "tokens in one forward and backward pass; lower it if memory runs out", 1)
    grad_clip: float = flag(1.0, "largest gradient norm; inf: no limit", 1e-9)
    eval_every: int = flag(20, "steps between evaluations; 0: only before and after", 0, demo=60)
    eval_size: int = flag(500, "questions to evaluate on", 1, demo=1000)
    eval_samples: int = flag(1, "answers to each: 1 is greedy, K gives mean accuracy and pass@K", 1)
    save_every: int = flag(20, "steps between checkpoints", 1)
    seed: int = flag(0, "of everything random", 0)
    out: str = flag("", "folder of the run; if empty, runs/MODEL-SELECT-SEED-TIME")
    audit: int = flag(0, "instead of training, hold the scores of so many tokens against true gradients", 0)
    show: bool = flag(False, "after each evaluation print two sampled answers with their kept tokens marked")
    resume: bool = flag(False, "go on from the last checkpoint in --out, with that run's settings")
    device: str = flag("auto", "cpu, cuda, ...; auto takes a GPU where there is one")
    dtype: str = flag("auto", "weights; auto: bfloat16 on a GPU", choices=("auto", "float32", "bfloat16"))
# ---- Sampling: our own short loop, whose logits give every token's statistics for free ---------------------
def in_chunks(function, vocabulary, *tensors, least=128):
    """`function` of a few rows at a time, its results joined along the last axis: memory does not grow."""
    rows = max(least, 2**(20 if tensors[0].device.type == "cpu" else 26) // vocabulary)
    return torch.cat([function(*chunk) for chunk in zip(*(x.split(rows) for x in tensors))], dim=-1)

def token_stats(logits, tokens, temperature=1.0):
    """logits (..., V) that predict tokens (...) in [0, V) -> logprob, entropy (nats), grad_norm: float32.
    All belong to pi = softmax(logits / temperature). With e_y the one-hot vector of the token y,
        grad_norm = ||d log pi(y) / d logits|| = ||e_y - pi|| / temperature
    where 1 - pi_y is taken as the sum of the other pi: no cancellation where pi_y is nearly 1."""
    def of_rows(logits, tokens):
        logp = (logits.float() / temperature).log_softmax(dim=-1)                           # (rows, V)
        probs, y = logp.exp(), tokens[:, None]  # (rows, V), (rows, 1)
        entropy = -(probs * logp.clamp_min(-1e30)).sum(dim=-1)   # -1e30: 0 * -inf is NaN      (rows,)
        others = probs.scatter(-1, y, 0.0)                                                  # (rows, V)
        norm = (others.sum(dim=-1).square() + others.square().sum(dim=-1)).sqrt() / temperature
        return torch.stack([logp.gather(-1, y)[:, 0], entropy, norm])                       # (3, rows)
    stats = in_chunks(of_rows, logits.shape[-1], logits.flatten(0, -2), tokens.flatten(), least=1)  # (3, all)
    return stats.view(3, *tokens.shape).unbind()
def draw(logits, temperature):
    """A token for each row of logits (n, V) by the inverse CDF -> (n,); temperature 0 takes the likeliest."""
    def of_rows(logits):
        cdf = (logits.float() / temperature).softmax(dim=-1).cumsum(dim=-1)                 # (rows, V)
        point = torch.rand_like(cdf[:, :1]).clamp_max(1 - 1e-6) * cdf[:, -1:]               # (rows, 1)
        return torch.searchsorted(cdf, point, right=True)[:, 0].clamp_max(logits.shape[1] - 1)
    return in_chunks(of_rows, logits.shape[-1], logits, least=1) if temperature > 0 else logits.argmax(dim=-1)
def forward(module, ids, mask, positions, cache=None, **more):
    """A pass of a transformers model -> output, key/value cache (once called past_key_values)."""
    name = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
    more |= {name: cache, "use_cache": True}
    output = module(input_ids=ids, attention_mask=mask, position_ids=positions, **more)
    return output, output[name]

@torch.no_grad()
def sample(model, prompt_ids, prompt_mask, samples, max_tokens, stop_ids, temperature):
    """Samples answers to left-padded prompts (P, L) -> tokens, mask, logprob, entropy, grad_norm, all (N, T).
    Rows i*G to i*G+G-1 answer prompt i, an end token (of `stop_ids`) included. Temperature 0 is greedy."""
    device, width, count = prompt_ids.device, prompt_ids.shape[1], len(prompt_ids) * samples
    stop, every = torch.tensor(sorted(stop_ids), device=device), 1 if device.type == "cpu" else 8
    tokens = stop[0].repeat(count, max_tokens)                                              # (N, T)
    mask = torch.zeros_like(tokens, dtype=torch.bool)                                       # (N, T)
    stats = torch.zeros(3, count, max_tokens, device=device)                                # (3, N, T)
    rows, running = torch.arange(count, device=device), torch.ones(count, dtype=torch.bool, device=device)
    positions = (prompt_mask.cumsum(1) - 1).clamp_min(0)                                    # (P, L)
    output, cache = forward(model, prompt_ids, prompt_mask, positions, logits_to_keep=1)
    cache.batch_select_indices(rows // samples)      # a prompt is computed once for its G answers
    logits, positions = output.logits[rows // samples, -1], positions[rows // samples, -1:]  # (N, V), (N, 1)
    seen = F.pad(prompt_mask, (0, max_tokens), value=1)[rows // samples]                    # (N, L+T)
    for t in range(max_tokens):                      # rows (n,): the answers still in the batch
        token = draw(logits, temperature)                                                   # (n,)
        stats[:, rows, t] = torch.stack(token_stats(logits, token, temperature or 1.0))     # (3, n)
        tokens[rows, t], mask[rows, t] = token, running
        running = running & ~torch.isin(token, stop)                                        # (n,)
        if t % every == 0 and not running.all():     # ended answers leave: the cost is the sum of the lengths
            stay = running.nonzero()[:, 0]           # (looking at `running` makes a CPU wait for its GPU)
            rows, token, positions, seen, running = (x[stay] for x in (rows, token, positions, seen, running))
            cache.batch_select_indices(stay)
        if t + 1 == max_tokens or len(rows) == 0: break
        output, cache = forward(model, token[:, None], seen[:, :width + t + 1], positions + t + 1, cache)
        logits = output.logits[:, -1]                                                       # (n, V)
    return tokens[:, :t + 1], mask[:, :t + 1], *(stats * mask)[:, :, :t + 1]
# ---- The algorithm, from rewards to the gradient. Down to policy_loss it is pure: tensors in, tensors out --
def group_advantages(rewards):
    """How much better an answer is than its group: rewards (P, G), finite -> advantages (P, G), float32.
        A = (r - mean) / (std + 1e-6)        with the group's population std        (GRPO, arXiv 2402.03300)
    Exactly 0 where a group's rewards are all equal (a rounded mean would make a signal): so for G = 1."""
    rewards = rewards.float()                                                               # (P, G)
    scale = rewards.std(dim=1, keepdim=True, correction=0) + 1e-6                           # (P, 1)
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)                            # (P, 1)
    return torch.where(equal, 0.0, (rewards - rewards.mean(dim=1, keepdim=True)) / scale)   # (P, G)

def policy_weight(logprobs, old_logprobs, advantages, clip_low=.2, clip_high=.28, ref_logprobs=None, beta=0.):
    """The factor of grad log pi(y_t) in the objective, not detached: (N, T) tensors, or A (N, 1) -> (N, T).
        omega = r * 1[not clipped] * A + beta * (pi_ref / pi - 1)     r = pi / pi_old     pi_ref: if beta > 0
    clipped: r > 1 + clip_high where A > 0, r < 1 - clip_low where A < 0 (PPO's rule with DAPO's bounds)."""
    ratio = (logprobs - old_logprobs).exp()
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    weight = torch.where(clipped, 0.0, ratio * advantages)
    return weight if beta == 0 else weight + beta * ((ref_logprobs - logprobs).exp() - 1)

def token_scores(select, entropy, grad_norm, weight):
    """What tokens are ranked by: tensors of one shape (None if not used) -> scores >= 0, larger is better."""
    if select == "gmts": return entropy * weight.abs()          # delta = |H * omega|         arXiv 2608.30632
    if select == "entropy": return entropy                      # H alone, the "80/20 rule"   arXiv 2506.01939
    if select == "exact": return grad_norm * weight.abs()       # the norm itself, at the logits
    if select == "random": return 1 - torch.rand_like(entropy)  # in (0, 1]: a 0 would never be chosen
    if select == "all": return torch.ones_like(entropy)         # plain GRPO, with fraction 1
    raise BadInput(f"unknown selector {select!r}; choose from {', '.join(SELECTORS)}")

def select_top(scores, mask, fraction):
    """The ceil(fraction * mask.sum()) highest scores among `mask`, if positive; of equal ones the earlier.
    scores float (NaN: never), mask bool (no group without signal) of one shape, fraction a number in (0, 1]
    -> keep, bool. By rank: a quantile as threshold keeps all if most scores are 0; 35 * 0.2 would make 8."""
    count = math.ceil(Fraction(str(fraction)) * int(mask.sum()))
    scores = torch.where(mask & (scores > 0), scores, 0.0).flatten()
    if count == 0: return torch.zeros_like(mask)
    threshold = scores.topk(count, sorted=False).values.min()
    above, ties = scores > threshold, (scores == threshold) & (scores > 0)
    return (above | ties & (ties.cumsum(0) <= count - above.sum())).view_as(mask)

def policy_loss(logprobs, old_logprobs, advantages, denominator, clip_low, clip_high, ref_logprobs=None,
                beta=0.0):
    """The clipped objective of the given tokens, negated, over `denominator` > 0, its kept tokens.
        - sum_t [ min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - beta (e^d - d - 1) ] / denominator
    d = log pi_ref - log pi: the last term estimates KL(pi || pi_ref) (k3, joschu.net/blog/kl-approx.html).
    Tensors of one shape, no padding -> scalar, its gradient -sum(policy_weight d logprobs) / denominator."""
    ratio = (logprobs - old_logprobs).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if beta != 0: objective = objective - beta * ((d := ref_logprobs - logprobs).exp() - d - 1)
    return -objective.sum() / denominator

@dataclass
class Batch:
    """A rollout: what was asked, what was answered, and what is known of it."""
    prompt_ids: torch.Tensor        # (P, L) padded on the left
    prompt_mask: torch.Tensor                                                               # (P, L)
    owner: torch.Tensor             # (N,) the prompt of each answer
    advantages: torch.Tensor                                                                # (N,)
    tokens: torch.Tensor            # (N, T) padded on the right
    mask: torch.Tensor                                                                      # (N, T)
    stats: torch.Tensor             # (3, N, T) logprobs, entropy, grad_norm under the policy that sampled

def micro_batches(batch, lengths, budget):
    """Packs rows of lengths (N,) > 0 by tokens -> lists; a group, which shares its prompt, side by side."""
    lengths, owner, packs, groups = lengths.tolist(), batch.owner.tolist(), [], set()
    longest = {group: max(n for n, o in zip(lengths, owner) if o == group) for group in set(owner)}
    for length, group, row in sorted((longest[g], g, i) for i, g in enumerate(owner) if lengths[i]):
        groups.add(group)
        if not packs or (len(packs[-1]) + 1) * length + len(groups) * batch.prompt_ids.shape[1] > budget:
            packs, groups = packs + [[]], {group}
        packs[-1].append(row)
    return packs
def masked_states(model, batch, mask, budget):
    """Yields for each micro-batch the place of its tokens in `mask` (N, T), (row (K,), column (K,)), and the
    states (K, D) that predict them. Answers without such a token stay out, others end at the last. A prompt
    is computed once for its answers, in the backward pass too: the gradient of an index is a sum."""
    lengths = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)   # (N,)
    for pack in micro_batches(batch, lengths, budget):
        rows, length = torch.tensor(pack, device=mask.device), int(lengths[pack].max())     # (n,)
        prompts, owner = torch.unique(batch.owner[rows], return_inverse=True)               # (p,), (n,)
        width = int(batch.prompt_mask[prompts].sum(1).max())
        seen = batch.prompt_mask[prompts, -width:]                                          # (p, L)
        positions = (seen.cumsum(1) - 1).clamp_min(0)                                       # (p, L)
        output, cache = forward(model.get_decoder(), batch.prompt_ids[prompts, -width:], seen, positions)
        hidden = output.last_hidden_state[owner, -1:]                                       # (n, 1, D)
        if length > 1:
            cache.batch_select_indices(owner)
            inputs = batch.tokens[rows, :length - 1]                                        # (n, T-1)
            seen = torch.cat([seen[owner], torch.ones_like(inputs)], dim=1)                 # (n, L+T-1)
            positions = positions[owner, -1:] + torch.arange(1, length, device=mask.device)  # (n, T-1)
            output, _ = forward(model.get_decoder(), inputs, seen, positions, cache)
            hidden = torch.cat([hidden, output.last_hidden_state], dim=1)                   # (n, T, D)
        row, column = mask[rows, :length].nonzero(as_tuple=True)                            # (K,), (K,)
        yield (rows[row], column), hidden[row, column]

def head(model, hidden):
    """The model's output layer: hidden (K, D) -> logits (K, V)."""
    get, logits = functools.partial(getattr, model.config), model.get_output_embeddings()(hidden)
    scale, cap = get("logit_scale", 1) / get("logits_scaling", 1), get("final_logit_softcapping", 0)
    logits = logits if scale == 1 else logits * scale                                       # Cohere, Granite
    return cap * torch.tanh(logits / cap) if cap else logits                                # Gemma 2 caps
@torch.no_grad()
def score_tokens(model, batch, mask, config):
    """logprobs, entropy, grad_norm of the tokens in `mask` (N, T) under `model` as it is now -> (3, N, T)."""
    def of_rows(states, y): return torch.stack(token_stats(head(model, states), y, config.temperature))
    stats = torch.zeros_like(batch.stats)                                                   # (3, N, T)
    for (row, column), hidden in masked_states(model, batch, mask, config.micro_tokens):
        stats[:, row, column] = in_chunks(of_rows, model.config.vocab_size, hidden, batch.tokens[row, column])
    return stats
def policy_gradient(model, batch, keep, denominator, config, ref_logprobs):
    """Adds the gradient of policy_loss over the tokens in `keep` (N, T) to the parameters -> the loss.
    Logits exist for some tokens at a time and are computed again by the backward pass: never an (N, T, V)."""
    def of_rows(hidden, tokens):
        return -F.cross_entropy(head(model, hidden).float() / config.temperature, tokens, reduction="none")
    recomputed, total = functools.partial(checkpoint, of_rows, use_reentrant=False), 0.0
    for place, hidden in masked_states(model, batch, keep, config.micro_tokens):
        logprobs = in_chunks(recomputed, model.config.vocab_size, hidden, batch.tokens[place])
        loss = policy_loss(logprobs, batch.stats[0][place], batch.advantages[place[0]], denominator,
                           config.clip_low, config.clip_high, ref_logprobs[place], config.beta)
        loss.backward()
        total += loss.detach()
    return total
# ---- The verifier: expressions by value, lists entry by entry, all else as tidied text; nothing is executed
# 1,234 · 2\frac34 · 5\% · 1.5 \times 10^3 · 1101_2 · 5! · \sqrt[3]{5} · \log_2 8 · \sin^2 x · |x| · f(x) = 2x
# 12\text{ cm} · \$4.50 · 60^\circ · (B) 19 · x \ge 5 · (1, 2) · [0, \infty) · \{1, 2\} · 1 \pm 2 · matrices
def extract_answer(text):
    """The last balanced box, else what follows the last ####, "answer is" or "Answer:", else None."""
    text, opened, box = re.sub(r"\\boxed +(\d+)", r"\\boxed{\1}", text.rpartition("</think>")[2]), [], None
    for brace in re.finditer(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]", text):               # one pass, linear
        if brace[0] != "}": opened.append(brace)
        elif opened and (start := opened.pop())[0] != "{": box = text[start.end():brace.start()]
    for marker in (r"####:?(?!.{,30}[Aa]nswer)", r"(?i)answer[*\s]*(?:\bis\b|:|(?=\$|\\[(\[]))"):
        if box is None and len(parts := re.split(marker, text)) > 1:
            box = re.split(r"[.!?](?:\s|$)|\n", re.sub(r"^[\s:*$]*(\\\[)?\s*", "", parts[-1]), maxsplit=1)[0]
            box = re.sub(r"^The [^=]* is ", "", box)                                    # The largest n is 34
    return (box or "").strip(" *`$\n") or None
MP = mpmath.MPContext()                              # a context of its own: nobody else's precision changes
FUNCTIONS = {name: getattr(MP, name) for name in "sin cos tan sec csc cot exp ln sqrt fac binomial".split()}
FUNCTIONS |= dict(Add=operator.add, Sub=operator.sub, Mult=operator.mul, Div=operator.truediv, abs=abs,
                  Pow=operator.pow, UAdd=operator.pos, USub=operator.neg, log=MP.log10, squared=lambda z: z*z,
                  frac=operator.truediv, mixed=lambda n, a, b: n + a/b / (a < b), root=lambda n, z: z**(1/n))
CONSTANTS, NAMED = dict(pi=MP.pi, e=MP.e, i=MP.j), "|".join(filter(str.islower, FUNCTIONS))
TRIG, GREEK = "(sin|cos|tan|sec|csc|cot|ln|log)", "pi|alpha|beta|gamma|theta|lambda|mu|phi|omega"
REWRITES = {                                                            # applied in this order
    r"(?<=\d) ?(?:\{ ?, ?\}|,?\\!|\\,) ?(?=\d{3})|(?<=\d)[, ](?=\d{3}(?!\d))(?![^(\[]*[)\]])": "",   # 1{,}234
    r"(?<!\\)\\\\(?=[A-Za-z]{2})": r"\\", r"\\[dtc](?=frac)": r"\\", r"\\\$ ?([\d.,]*\d)": r"\1 dollars",
    r"\\(?:text\w*|mathrm|mathbf|[mh]box|boxed)\s*\{([^{}]*)\}(?:\^\{?([23])\}?)?": r" \1\2 ",        # cm^2
    r"\\(?:left|right|displaystyle)(?![a-z])|(?<!\\)\\[()\[\]{}]|(?<=[\d})]) ?(?:\\approx|≈).*": "",
    r"(?<!\\)\\(?:angle|q?quad|[,!;:$ ])|[$~]|\*\*(?= *$)": " ", r"\*\*": "^", r"\s+": " ", "[−–]": "-",
    r"(?<!\\)[A-Z][a-z]+": lambda word: word[0].lower(), "['\"]": "′", r"\\(?:[lr]?vert|mid)": "|",
    r"^[^,]*(?:\\(?:lim|sum|prod|int|bmod)|\{vmatrix)[^,]*=(?![^{}]*\})": "",           # \lim ... = 5 -> 5
    r"[(\[]?\\begin\{\w+\}(?:\{[lcr| ]*\})?": "[", r"(?:\\\\\s*)?\\end\{\w+\}[)\]]?": "]", r"\\\\": "#",
    r"\^\s*\{?\s*\\circ\s*\}?|\bdegrees?\b": "°", r"\\?%|\b(?:percent(?:age)?|pct)\b": "%", r"\\in\b": "=",
    r";|\\cup|,? *\b(and|or)\b": ",", r"=[^,=]*(?==)": "", r"\\infty|∞": "oo", "π": r"\\pi ",
    r"\\(?:cdot|times)|[×·]": "*", r"\\div|:(?![^:=]*:)": "/", r"\\pm": "±", r"\\lt\b": "<", r"\\gt\b": ">",
    r"\\leq?(slant)?\b|<=": "≤", r"\\geq?(slant)?\b|>=": "≥", r"√(\d+)": r"\\sqrt{\1}", "√": r"\\sqrt",
    r"\\[dt]?binom": r"\\binomial", r"\\(frac|binomial|sqrt) ?(\d)": r"\\\1{\2}",                    # \frac12
    r"(frac\{[^{}]*\}) ?(\d)": r"\1{\2}", r"\\sqrt ?\[(.*?)\]": r"\\root{\1}", r"\|([^|]+)\|": r"\\abs{\1}",
    r"(?<![\d.^_])(\d+)(?: ?\\frac\{(\d+)\}\{(\d+)\}| (\d+)/(\d+))": r"\\mixed{\1}{\2\4}{\3\5}",     # 2 3/4
    r"\\log ?_ ?(\w|\{[^{}]*\}) ?([\d.]*\d|\w|\{[^{}]*\}|\([^()]*\))": r"\\frac{\\log{\2}}{\\log{\1}}",
    rf"{TRIG} ?\^ ?(2|\{{2\}})": r"squared \1", r"(\b\d+|\([^()]*\))!": r"\\fac{\1}", r"_ ?\{(\w+)\}": r"_\1",
    rf"{TRIG}((?: ?(?:\.?\d|[a-z](?![a-z])|\\(?:{GREEK}))(?:\^(?:\w|\{{\w+\}}))?)+)": r"\1{\2}",   # \sin 2x
    r"(?<=[\w)}]) *\\(?=[a-z])": "*", r"\\": "", r" ?([-+*^,()\[\]/=<>≤≥&#%°]) ?|(?<![., ])[., ]+$|^ ": r"\1",
    r"^\{([^{}]*,[^{}]*)\}$|(?<![^,])\((-?[\w./]+)\)(?![^,])": r"\1\2", rf"{TRIG}\*": r"\1 "}       # (5) -> 5
UNIT = (rf"(?:(?<=[\d)}}])|(?<=pi))(?: |(?=[ckm]m|kg|ft|[%°]))(?!{NAMED}|.*\b(?:not|hal[fv]|dozen|hundred|"
        r"over|point|tenth|thousand|[a-z]*illion|times|plus|minus|wrong))"
        r"((?:[a-z]{3,}?|[ckm]m|kg|ft|in|mi|lb|oz|hr|[ghlm%°])(?:[ /][a-z]+?)*?[23]?)s? *$")
SUM = r"[\d.)}](?:\*(?!10\^)|[+-]|\(| \d)|[)}]\d|\d\{"                 # 3*4+2, but not 3*10^2
NAME = (rf"(?:[a-z](?:_\w+)?(?:\(\w\))?|[a-z ]{{4,}}|{GREEK}|[A-Z](?:[A-Z/_]|(?<=_)[a-z\d]+)*(?:\(\w\))?|"
        r"\([a-z](?:,[a-z])*\)|(?:abs|frac)[{A-Z}]+)")                  # x_1, f(x), AB/CD, (x, y), |AB|
SOLVED = (rf"(?:^|(?<=,)){NAME}=|={NAME}$|^(?:[^A-Za-z=,]|{NAMED}|pi|[ei](?![a-z]))*=" # x = 5, 5 = x, 2 + 3 =
          "(?!.*(?<![A-Za-z])[A-Za-df-hj-z](?![A-Za-z]))")
NEXT_BOX = r"\}[\s$.]*(?:(?:\\q?quad|\\text\{|\\[()\[\],;]|,|;|and|or)[\s$}]*){1,9}\\boxed\s*\{"
CHOICE = r"^(?:\\text\w*\{)?\(?([A-Z])[).:]\}?(?:\\? (?!.*(?:\b[A-Z]\b|,|\bor\b)).*)?$"               # (B) 19
@functools.lru_cache(10_000)
def tidy(text):
    """One spelling for each symbol, no spaces around it."""
    for pattern, new in REWRITES.items(): text = re.sub(pattern, new, text)
    return ",".join(text.replace("±", sign) for sign in "+-") if "±" in text else text
def value(node, point):
    """An expression's value where its letters are positive, negative or complex; raises if it is large."""
    match node:
        case ast.Constant(text): return MP.mpf(text)
        case ast.Name(name):
            a, b = random.Random(name).sample(range(1000, 5000), 2)
            return CONSTANTS.get(name) or (MP.mpf(a), -MP.mpf(b), MP.mpc(a, b), MP.mpc(-b, a))[point] / 997
        case ast.BinOp(ast.Name(name), ast.Pow(), x) if name in FUNCTIONS: nodes = [x]              # sin ** x
        case ast.BinOp(x, op, y): name, nodes = type(op).__name__, [x, y]
        case ast.UnaryOp(op, x): name, nodes = type(op).__name__, [x]
        case ast.Call(ast.Name(name), nodes): pass
        case _: raise ValueError(node)
    result = FUNCTIONS[name](*(value(x, point) for x in nodes))
    if result and not 1e-300 < abs(result) < (1e40 if name in ("Add", "Sub") else 1e300): raise OverflowError
    return result
def fingerprint(text, digits):
    """What all spellings of an expression share: its values in so many digits; of any other text itself."""
    MP.dps = 60                                      # digits; said here because threads share the context
    code = re.sub("(.+)=(.+)", r"\1-(\2)", text).replace("}{", ",").translate(str.maketrans("{}", "()"))
    tokens = re.findall(rf"^[a-z ]{{3,}}$|{NAMED}|{GREEK}|[A-Za-z]_\w+|\d+_\w+|[\d.]+|\S", code)
    code = re.sub(rf"\b({NAMED}) (\()?", lambda m: m[1] + (m[2] or "**"), " ".join(tokens).replace("^", "**"))
    code = re.sub(r"(?<![\w.])([\d.]+)", r"'\1'", code).replace("' '", "?")             # 1 2 is no number
    code = re.sub(r"(?<=[\w')]) (?=[\w'(])", "*", code)                                 # 2 x
    try:
        tree = ast.parse(code, mode="eval").body
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {*FUNCTIONS, *CONSTANTS}
        values = [value(tree, point) for point in range(4)] if names else [value(tree, 0)] * 4
        if "=" in text: values = [x / (values[0] - values[1]) for x in values]        # equal but for a factor
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, SyntaxError): return text
    parts = ((part, abs(x)) for x in map(MP.mpc, values) for part in (x.real, x.imag))
    return " ".join(MP.nstr(part if abs(part) > size * 1e-40 else 0, digits) for part, size in parts)
def interval(text):
    """x>=5 and 5<=x as [5,oo), 0<x<=1 as (0,1], any other x>y as y<x."""
    text = "".join(re.split("([>≥])", text)[::-1]).translate(str.maketrans(">≥", "<≤"))
    m = set(text) & set("<≤") and re.fullmatch(rf"(?:([^<≤]+)([<≤]))?{NAME}(?:([<≤])([^<≤]+))?", text)
    return f"{'(['[m[2] == '≤']}{m[1] or '-oo'},{m[4] or 'oo'}{')]'[m[3] == '≤']}" if m else text
def answers_match(answer, gold):
    """Is `answer` the same object as `gold`? Two different units are not; one alone does not matter."""
    if max(len(answer), len(gold)) > 2000: return answer == gold
    if all(re.fullmatch(r"-?\d+", text) for text in (answer, gold)): return int(answer) == int(gold)
    if re.fullmatch("[A-Z]", gold): return tidy(re.sub(CHOICE, r"\1", answer)).lower() == gold.lower()
    a, g = tidy(answer), tidy(gold)
    if a.lower() == g.lower() or not g: return bool(g)
    if max(len(a), len(g)) > 250: return False
    units = [unit and unit[1] for unit in (re.search(UNIT, text) for text in (a, g))]
    a, g = (re.sub(UNIT, "", text) for text in (a, g))
    if ("=" in a) != ("=" in g): a, g = re.sub(SOLVED, "", a), re.sub(SOLVED, "", g)
    a, g = (",".join(map(interval, text.split(","))) for text in (a, g))
    if all(units) and units[0] != units[1] or ("," in a) != ("," in g): return False
    if re.fullmatch(rf"(?:{NAME}=)?-?[\d.]+", g) and re.search(SUM, a): return False    # the question, boxed
    digits = 45 if ("." in a) == ("." in g) or re.search(r"^-?\d+;|;-?\d+$|=", f"{a};{g}") else 7     # \sqrt2
    def canonical(text):
        parts = re.split(r"([,&#()\[\]])", text) if set(text) & set(",&#") else [text]
        parts[::2] = [fingerprint(part, digits) for part in parts[::2]]
        return sorted(re.split(r",(?![^(\[]*[)\]])", "".join(parts)))   # a list; in brackets the order counts
    texts = {a} | {f"({a}){op}100" for op, unit in zip("/*", units) if unit == "%" and not all(units)}
    return canonical(g) in map(canonical, texts)
def is_correct(completion, gold):
    """The reward: is the completion's answer right? Boxes in a row are one list, if that is what is asked."""
    texts = dict.fromkeys((completion, re.sub(NEXT_BOX, ", ", completion)))
    return any(answer is not None and answers_match(answer, gold) for answer in map(extract_answer, texts))
# ---- Data: questions and reference answers in the shapes in which people have them -------------------------
GSM8K = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
MATH = "https://media.githubusercontent.com/media/openai/prm800k/main/prm800k/math_splits/"
ADDRESSES = {"gsm8k": GSM8K + "train.jsonl", "gsm8k-test": GSM8K + "test.jsonl",    # 7,473 and 1,319 problems
             "math": MATH + "train.jsonl", "math-test": MATH + "test.jsonl"}        # 12,000 and 500 problems
QUESTION_COLUMNS = ("question", "problem", "prompt", "input", "Question")
ANSWER_COLUMNS = ("answer", "final_answer", "target", "Answer", "answerKey", "solution")
def read_record(record):
    """One record of a data file -> (question, answer), or BadInput."""
    question = next((record[name] for name in QUESTION_COLUMNS if record.get(name)), "")
    answer = next((record[name] for name in ANSWER_COLUMNS if record.get(name) not in (None, "", [])), "")
    choices = record.get("choices", [])
    if isinstance(question, dict): question, choices = question["stem"], question["choices"]  # CommonsenseQA
    if isinstance(choices, list): choices = {key: [c[key] for c in choices] for key in ("label", "text")}
    answer = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    answer = str(answer).strip() if isinstance(answer, (str, int, float)) else ""
    if re.search(r"####|\\(boxed|fbox)", answer): answer = extract_answer(answer) or ""    # a worked solution
    if not isinstance(question, str) or not question.encode().strip() or not answer:
        what, columns = ("answer", ANSWER_COLUMNS) if question else ("question", QUESTION_COLUMNS)
        raise BadInput(f"no {what} in any of the columns {', '.join(columns)}")
    question = f"{record.get('Body', '')} {question}".strip()                    # SVAMP has its facts in Body
    return question + "".join(f"\n({a}) {text}" for a, text in zip(choices["label"], choices["text"])), answer
def load_problems(source):
    """A name (downloaded once, into torch.hub's cache), demo or a file -> [(question, answer), ...]."""
    if source == "demo": return demo_problems()
    path = os.path.join(torch.hub.get_dir(), "gmts", source + ".jsonl") if source in ADDRESSES else source
    with explain(f"data {ADDRESSES.get(source, source)}"):
        if source in ADDRESSES and not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.hub.download_url_to_file(ADDRESSES[source], path, progress=False)
        with open(path, encoding="utf-8-sig") as file: text = file.read()
        array, problems = text.lstrip().startswith("["), []
        for number, line in enumerate(json.loads(text) if array else text.split("\n"), 1):
            with explain(f"{'record' if array else 'line'} {number}"):
                if array or line.strip(): problems.append(read_record(line if array else json.loads(line)))
    return problems
def split_problems(config):
    """-> problems to train on, problems to evaluate on; no question is in both."""
    train, name = load_problems(config.data), config.eval_data or config.data + "-test"
    held_out = [p for p in train if hashlib.sha256(p[0].encode()).digest()[0] < 26]         # a tenth
    test = load_problems(name) if config.eval_data or name in ADDRESSES else held_out
    asked = {question for question, _ in test}
    train = [problem for problem in train if problem[0] not in asked]
    if not (train and test): raise BadInput(f"data {config.data}: too few questions to train and evaluate on")
    return train, test[:config.eval_size]
# ---- Models: a small adder made on the spot, or whatever transformers loads --------------------------------
def demo_problems(count=20_000):
    """Questions such as 348+214= with their sums."""
    rng = random.Random(0)
    pairs = dict.fromkeys((rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(count))
    return [(f"{a}+{b}=", str(a + b)) for a, b in pairs]
def careless_pupil(question, rng):
    """Adds column by column from the right, 348+214= -> 8+4+0=12 4+1+1=06 3+2+0=05 ####562, but forgets seven
    carries in ten and slips by one in 3% of the columns."""
    columns, digits, carry = [], "", 0
    for a, b in zip(*(reversed(number) for number in question.rstrip("=").split("+"))):
        carry = 0 if rng.random() < 0.7 else carry
        slip = rng.choice((-1, 1)) if rng.random() < 0.03 else 0
        columns.append(f"{a}+{b}+{carry}={max(0, int(a) + int(b) + carry + slip):02d}")
        carry, digits = int(columns[-1][-2]), columns[-1][-1] + digits
    return " ".join(columns) + f" ####{carry or ''}{digits}"
def demo_model(problems, steps=600):
    """A Qwen2 of 242k parameters that has watched a careless pupil add for 40 s -> model, tokenizer."""
    symbols = {s: i for i, s in enumerate(["<end>", "<unknown>", "####", *"0123456789+= "])}
    words = Tokenizer(models.WordLevel(symbols, unk_token="<unknown>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split(Regex("####|."), "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    model = AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=len(symbols), hidden_size=96, intermediate_size=288, num_hidden_layers=2, eos_token_id=0,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True, bos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for step in range(steps):
        questions = [random.choice(problems)[0] for _ in range(64)]
        texts = [q + careless_pupil(q, random) + "<end>" for q in questions]
        texts = tokenizer(texts, padding=True, return_tensors="pt")
        labels = texts.input_ids.masked_fill(texts.attention_mask == 0, -100)               # (64, L+T)
        labels[:, :len(questions[0])] = -100
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 - 0.95 * step / steps)
        model(input_ids=texts.input_ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer
ORGANISATIONS = {"Qwen": "Qwen", "SmolLM": "HuggingFaceTB", "Llama": "meta-llama", "gemma": "google"}
def load_model(name, dtype, device="cpu", problems=(), seed=0):
    """A local folder, a hub name with or without its usual organisation, or demo -> model, tokenizer."""
    set_seed(seed)
    if name != "demo" and not os.path.isdir(name) and "/" not in name:
        name = next((f"{org}/{name}" for start, org in ORGANISATIONS.items() if name.startswith(start)), name)
    with explain(f"model {name} (a local folder, or a name of the hub)"):
        model, tokenizer = demo_model(problems) if name == "demo" else (
            AutoModelForCausalLM.from_pretrained(name, dtype=dtype), AutoTokenizer.from_pretrained(name))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model.to(device).eval(), tokenizer        # eval: dropout would make the update see another policy
def render(tokenizer, text, answer=None):
    """A question, and perhaps an answer, as the model reads it: a chat if there is a template for one."""
    if tokenizer.chat_template is None: return text
    chat = [{"role": "user", "content": text}] + [{"role": "assistant", "content": answer}] * bool(answer)
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answer is None)
def end_tokens(model, tokenizer):
    """The ids that end an answer: a model may have several, and a base model's chat template one more."""
    known = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(known if isinstance(known, list) else [known])} - {None}
    closing = render(tokenizer, "?", "gmts").rpartition("gmts")[2].strip() if tokenizer.chat_template else ""
    ends |= set(tokenizer(closing, add_special_tokens=False).input_ids[:1]) & set(tokenizer.all_special_ids)
    if not ends: raise BadInput("the tokenizer has no end token: set eos_token in tokenizer_config.json")
    return ends
# ---- Training. `run` is what prepare() returns: the model and all that belongs to this run -----------------
def gather(value):
    """The values of all processes, in the order of their ranks."""
    everyone = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(everyone) > 1: dist.all_gather_object(everyone, value)
    return everyone
def make_optimizer(model):
    """AdamW over float32 masters, since bfloat16 rounds an update of 1e-6 away; float32 is its own master."""
    def collect(weight, master):
        master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
        weight.grad = None
    masters = [w if w.dtype == torch.float32 else w.detach().float() for w in model.parameters()]
    for weight, master in zip(model.parameters(), masters):
        if weight is not master: weight.register_post_accumulate_grad_hook(lambda w, m=master: collect(w, m))
    return torch.optim.AdamW(masters, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
def apply_gradient(run, loss):
    """Clips, and takes the optimizer's step if loss and gradient are finite -> the norm of the gradient."""
    masters = run.optimizer.param_groups[0]["params"]
    for master in masters if run.world > 1 else ():
        master.grad = torch.zeros_like(master) if master.grad is None else master.grad
        dist.all_reduce(master.grad)
    norm = float(torch.nn.utils.clip_grad_norm_(masters, run.config.grad_clip)) + 0 * sum(gather(float(loss)))
    if math.isfinite(norm):
        run.busy = True                              # a signal waits until the step is in the log
        run.optimizer.step()
        for weight, master in zip(run.model.parameters(), masters): weight.data.copy_(master)      # rounds
    run.optimizer.zero_grad()
    return norm

def learn(run, batch):
    """Ranks the tokens of informative groups, takes --updates steps on the best -> sums of the log, norms."""
    config, norms, clip = run.config, [], (run.config.clip_low, run.config.clip_high)
    old, advantages = batch.stats[0], batch.advantages[:, None].expand_as(batch.mask)       # (N, T)
    informative = batch.owner[batch.advantages != 0].unique()                               # (prompts,)
    sums = torch.tensor([len(informative), 0.0, 0, 0, 0])
    for update, prompts in enumerate(informative.tensor_split(config.updates)):
        mask = batch.mask & torch.isin(batch.owner, prompts)[:, None]                       # (N, T)
        ref = score_tokens(run.reference, batch, mask, config)[0] if config.beta else old   # (N, T)
        stats = score_tokens(run.model, batch, mask, config) if update else batch.stats     # (3, N, T)
        weight = policy_weight(stats[0], old, advantages, *clip, ref, config.beta)          # (N, T)
        scores = token_scores(config.select, stats[1], stats[2], weight)                    # (N, T)
        everyone = gather(scores[mask].nan_to_num(math.inf).cpu())   # NaN must surface, as a skipped update
        ranked, share = torch.cat(everyone), 1 if config.select == "all" else config.fraction
        chosen = select_top(ranked, torch.ones_like(ranked).bool(), share)                  # of all processes
        mine = chosen.split([len(part) for part in everyone])[run.rank].to(mask.device)     # (n,)
        keep = mask.masked_scatter(mask, mine)                                              # (N, T)
        if config.show: run.shown = batch, keep, scores * mask
        clipped = (policy_weight(stats[0], old, advantages, *clip) == 0) & (advantages != 0) & mask
        sums += torch.tensor([0, keep.sum(), stats[1][keep].sum(), mask.sum(), clipped.sum()])
        if chosen.any():
            loss = policy_gradient(run.model, batch, keep, int(chosen.sum()), config, ref)
            norms.append(apply_gradient(run, loss))
    return sums.tolist(), norms
def rollout(run, problems, samples, temperature):
    """Samples answers to problems [(prompt, answer), ...] and judges them -> Batch, rewards (P, G)."""
    prompts = run.tokenize([p for p, _ in problems], padding=True, padding_side="left", return_tensors="pt")
    seen = prompts.attention_mask.to(run.model.device)                                      # (P, L)
    ids = prompts.input_ids.to(seen.device) * seen               # 0: a token every model has (P, L)
    tokens, mask, *stats = sample(run.model, ids, seen, samples, run.config.max_tokens, run.ends, temperature)
    answers, rewards = [row[:n] for row, n in zip(tokens.tolist(), mask.sum(1).tolist())], []
    for i, text in enumerate(run.tokenizer.batch_decode(answers, skip_special_tokens=True)):
        with explain(f"the reward of the completion {text[:60]!r}"):
            rewards.append(float(run.reward(text, problems[i // samples][1])))
            if not math.isfinite(rewards[-1]): raise ValueError(f"{rewards[-1]} is not a finite number")
    rewards = torch.tensor(rewards, device=mask.device).view(-1, samples)                   # (P, G)
    owner = torch.arange(len(problems), device=mask.device).repeat_interleave(samples)      # (N,)
    advantages = group_advantages(rewards).flatten()                                        # (N,)
    return Batch(ids, seen, owner, advantages, tokens, mask, torch.stack(stats)), rewards
def evaluate(run):
    """The mean reward of K = --eval-samples answers a problem -> {"accuracy"}, with "pass_at_k" if K > 1."""
    config, k, rewards = run.config, run.config.eval_samples, []
    mine, size = run.evaluation[run.rank::run.world], max(1, config.prompts * config.samples // k)
    torch.manual_seed(config.seed)                   # every step of training sets its own seed
    for i in range(0, len(mine), size):
        rewards += rollout(run, mine[i:i + size], k, config.temperature * (k > 1))[1].tolist()
    won = torch.tensor(sum(gather(rewards), []))                                            # (Q, K)
    return dict(accuracy=won.mean().item(), **{"pass_at_k": won.amax(1).mean().item()} if k > 1 else {})
COLUMNS = dict(step="d", reward=".3f", informative=".0%", length=".1f", entropy=".3f", entropy_kept=".3f",
               kept=".1%", grad_norm=".3f", clipped=".1%", skipped="d", lr=".1e", tokens_per_s=".0f",
               seconds=".2f", peak_gb=".2f", accuracy=".3f", pass_at_k=".3f")
def train_step(run):
    """A rollout and its updates -> the log's figures. Seeded by (seed, step, process): no state to keep."""
    config, data, start = run.config, run.problems, time.perf_counter()
    set_seed(int(np.random.SeedSequence([config.seed, run.step, run.rank]).generate_state(1)[0]))
    epoch, place = np.divmod(run.step * config.prompts + np.arange(config.prompts), len(data))
    order = {e: np.random.default_rng([config.seed, e]).permutation(len(data)) for e in epoch}
    share = np.array_split(np.stack([epoch, place], axis=1), run.world)[run.rank]
    batch, rewards = rollout(run, [data[order[e][i]] for e, i in share], config.samples, config.temperature)
    lr = config.lr * min(1, (run.step + 1) / max(1, config.warmup))
    run.optimizer.param_groups[0]["lr"] = lr = lr * (1 - (1 - config.lr_end) * run.step / config.steps)
    sums, norms = learn(run, batch)
    sums += [rewards.sum().item(), rewards.numel(), batch.mask.sum().item(), batch.stats[1].sum().item()]
    groups, kept, kept_entropy, ranked, clipped, reward, count, tokens, entropy = map(sum, zip(*gather(sums)))
    seconds, finite = time.perf_counter() - start, [norm for norm in norms if math.isfinite(norm)]
    peak = torch.cuda.max_memory_allocated() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return dict(step=run.step + 1, reward=reward / count, informative=groups / config.prompts,
                length=tokens / count, entropy=entropy / tokens, entropy_kept=kept_entropy / max(1, kept),
                kept=kept / max(1, ranked), grad_norm=sum(finite) / max(1, len(finite)),
                clipped=clipped / max(1, ranked), skipped=len(norms) - len(finite), lr=lr,
                tokens_per_s=tokens / seconds, seconds=seconds, peak_gb=peak / 1e9)
def checkpoints(out): return sorted(glob.glob(os.path.join(glob.escape(out), "step-" + "[0-9]" * 6)))
def save_checkpoint(run):
    """OUT/step-NNNNNN for transformers, with optimizer and log: renamed when whole, the older goes last."""
    path = os.path.join(run.config.out, f"step-{run.step:06d}")
    if run.rank == 0 and not os.path.exists(path):
        for part in (run.model, run.tokenizer): part.save_pretrained(path + ".part")
        masters = run.optimizer.param_groups[0]["params"] if run.model.dtype != torch.float32 else []
        torch.save(dict(step=run.step, rows=run.rows, masters=masters, optimizer=run.optimizer.state_dict()),
                   path + ".part/trainer.pt")
        os.rename(path + ".part", path)
        for old in checkpoints(run.config.out)[:-1]: shutil.rmtree(old)
def prepare(config):
    """Device, data, folder, model, optimizer, checkpoint -> run: all that the functions above share."""
    run = argparse.Namespace(config=config, step=0, rows=[dict(step=0)], busy=False, stop=False)
    run.rank, run.world = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
    device = config.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.startswith("cuda")
    with explain(f"--device {config.device}"):
        if gpu: torch.cuda.set_device(device if ":" in device else int(os.getenv("LOCAL_RANK", "0")))
        torch.empty(0, device=device)
    if run.rank: sys.stdout = open(os.devnull, "w")                     # only the first process speaks
    if run.world > 1: dist.init_process_group("nccl" if gpu else "gloo")
    with explain(f"--reward {config.reward} (FILE.py:FUNCTION)"):
        path, _, name = config.reward.rpartition(":")
        run.reward = runpy.run_path(path)[name] if config.reward else is_correct
    splits = split_problems(config)
    if run.rank == 0 and not config.resume:
        with explain(f"--out {config.out} (a new folder; --resume goes on with the run in an old one)"):
            os.makedirs(config.out, exist_ok=not os.path.exists(config.out + "/metrics.csv"))
        with open(config.out + "/config.json", "w") as file: json.dump(asdict(config), file, indent=1)
    dtype = config.dtype.replace("auto", "bfloat16" if gpu else "float32")
    load = functools.partial(load_model, dtype=dtype, device=device, problems=splits[0], seed=config.seed)
    saved = checkpoints(config.out)[-1] if config.resume else None
    run.model, run.tokenizer = load(saved or config.model)
    run.reference = load(config.model)[0].requires_grad_(False) if config.beta else None
    run.ends, run.optimizer = end_tokens(run.model, run.tokenizer), make_optimizer(run.model)
    if saved:
        with explain(f"checkpoint {saved}"):
            state = torch.load(os.path.join(saved, "trainer.pt"), map_location=device, weights_only=True)
            run.step, run.rows = state["step"], state["rows"]
            run.optimizer.load_state_dict(state["optimizer"])
            for master, kept in zip(run.optimizer.param_groups[0]["params"], state["masters"]):
                master.data.copy_(kept)
    log = os.devnull if run.rank else os.path.join(config.out, "metrics.csv")
    run.csv = csv.DictWriter(open(log, "w", buffering=1), COLUMNS)
    run.csv.writerows([dict(zip(COLUMNS, COLUMNS)), *run.rows[:-1]])    # train() adds the last
    run.tokenize = functools.partial(run.tokenizer, add_special_tokens=run.tokenizer.chat_template is None)
    limit = (getattr(run.model.config, "max_position_embeddings", None) or 10**9) - config.max_tokens
    splits = [[(render(run.tokenizer, config.prompt.replace("{question}", question)), answer)
               for question, answer in split] for split in splits]
    run.problems, run.evaluation = ([p for p, ids in zip(split, run.tokenize([p[0] for p in split]).input_ids)
                                     if len(ids) <= limit] for split in splits)
    run.too_long = sum(map(len, splits)) - len(run.problems) - len(run.evaluation)
    if not (run.problems and run.evaluation): raise BadInput(f"no prompt fits into {limit} tokens of context")
    return run

def show(run):
    """Prints a right and a wrong answer of the last rollout, kept tokens marked, and their five best."""
    batch, keep, scores = run.shown
    start, end = ("\033[7m", "\033[0m") if sys.stdout.isatty() and not os.getenv("NO_COLOR") else "[]"
    for name, rows in (("right", batch.advantages > 0), ("wrong", batch.advantages < 0)):
        row = (rows * (1 + keep.sum(1))).argmax()                                  # with the most kept tokens
        ids = batch.tokens[row][batch.mask[row]].tolist() if rows.any() else []
        texts = [run.tokenizer.decode(ids[:n]).rstrip("\ufffd") for n in range(len(ids) + 1)]
        words = ["".join(c if c.isprintable() else repr(c)[1:-1] for c in longer[len(text):])
                 for text, longer in zip(texts, texts[1:])]     # what a model wrote must not steer a terminal
        marked = (start + word + end if kept else word for word, kept in zip(words, keep[row].tolist()))
        best = zip(*(x.tolist() for x in scores[row, :len(ids)].topk(min(5, len(ids)))))
        print(f"  {name}: {''.join(marked) or 'none'}\n    largest {run.config.select} scores:",
              ", ".join(f"{words[i]!r} {score:.3f}" for score, i in best))
def audit(run):
    """Prints how well scores foretell the norm of single tokens' gradients over all parameters: Spearman's
    correlation, its mean inside answers, and the share of the top --fraction's norms that they catch."""
    config, masters, true = run.config, run.optimizer.param_groups[0]["params"], []
    batch, _ = rollout(run, run.problems[:config.prompts], config.samples, config.temperature)
    rows = batch.advantages.nonzero()[:, 0]                                                 # (informative,)
    if not len(rows): raise BadInput("--audit: equal rewards in every group; try more --prompts or --samples")
    rows = rows[torch.randperm(len(rows))]
    enough = 1 + (batch.mask[rows].sum(1).clamp_max(10).cumsum(0) < config.audit).sum()     # answers
    places = batch.mask[rows[:enough]].nonzero()                                            # (tokens, 2)
    places = places[torch.randperm(len(places))[:config.audit]]                             # (n, 2)
    row, column = rows[places[:, 0]], places[:, 1]                                          # (n,), (n,)
    for place in zip(row, column):
        keep = torch.zeros_like(batch.mask).index_put_(place, batch.mask.new_ones(()))      # (N, T)
        policy_gradient(run.model, batch, keep, 1, config, batch.stats[0])
        true.append(torch.nn.utils.get_total_norm([w.grad for w in masters if w.grad is not None]))
        run.optimizer.zero_grad()
    true, weight = torch.stack(true), batch.advantages[row]                                 # (n,), (n,)
    def ranks(x): return ((x[:, None] > x) + 0.5 * (x[:, None] == x)).sum(1)    # equal ones share their ranks
    def spearman(x, y): return torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1]
    def mass(x): return true[select_top(x, torch.ones_like(x).bool(), config.fraction)].sum()
    print(f"{len(true)} tokens of {len(row.unique())} answers\nscore      Spearman  in an answer  mass")
    scores = {name: token_scores(name, *batch.stats[1:, row, column], weight) for name in SELECTORS[:-1]}
    for name, x in (scores | {"|A|": weight.abs()}).items():
        several = [row == r for r in row.unique() if (row == r).sum() > 2]
        inside = torch.tensor([spearman(x[own], true[own]) for own in several]).nanmean()
        print(f"{name:10} {spearman(x, true):8.3f} {inside:13.3f} {mass(x) / mass(true):5.3f}")

def train(config):
    """Trains as the configuration says -> the rows of the log."""
    run = prepare(config)
    print(*(f"{name} {value!r}" for name, value in asdict(config).items()), sep="\n")
    print(f"{run.model.num_parameters():,} parameters, {run.model.dtype} on {run.world} x {run.model.device};"
          f" {len(run.problems):,} problems to train on, {len(run.evaluation):,} to evaluate on, "
          f"{run.too_long} left out as too long; the run is kept in {config.out}")
    if config.audit: return audit(run)
    def on_signal(*_):
        run.stop = True
        if not run.busy: raise KeyboardInterrupt
    for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, on_signal)
    try:
        while True:                                  # a row gets its accuracy here, after a resume too
            due = run.step in (0, config.steps) or config.eval_every and run.step % config.eval_every == 0
            if due and not run.stop and "accuracy" not in run.rows[-1]: run.rows[-1] |= evaluate(run)
            run.csv.writerow(row := run.rows[-1])
            note = ["(equal rewards in every group: nothing to learn from)"] * (row.get("informative") == 0)
            print(*(f"{k} {row[k]:{form}}" for k, form in COLUMNS.items() if k in row), *note, flush=True)
            if due and "shown" in run: show(run)
            if run.step and run.step % config.save_every == 0: save_checkpoint(run)
            if len(run.rows) > 10 and all(row["skipped"] == config.updates for row in run.rows[-10:]):
                raise BadInput("loss or gradient not finite in 10 steps: lower --lr or use --dtype float32")
            if run.stop: raise KeyboardInterrupt     # a signal came during the update
            if run.step == config.steps: break
            run.rows.append(train_step(run))
            run.step, run.busy = run.step + 1, False
    finally:
        if not run.busy: save_checkpoint(run)
    print(f"accuracy {run.rows[0]['accuracy']:.3f} -> {run.rows[-1]['accuracy']:.3f}; the model is in "
          f"{config.out}/step-{run.step:06d}")
    return run.rows
def parse(argv):
    """The command line -> Config: flags, else the settings of the run to resume or of the demo."""
    parser = argparse.ArgumentParser("gmts.py", description=__doc__.split("\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"gmts.py: {message}; --help lists the flags\n")
    options = {f: "--" + f.name.replace("_", "-") for f in fields(Config)}
    for f, option in options.items():
        kw = dict(action="store_true") if f.type is bool else dict(type=f.type, choices=f.metadata["choices"])
        parser.add_argument(option, default=f.default, help=f.metadata["help"], **kw)
    first, saved = parser.parse_args(argv), {}
    if first.resume:
        with explain("--resume needs a run with a checkpoint"), open(first.out + "/config.json") as file:
            saved = json.load(file) | {"resume": bool(checkpoints(first.out)[-1])}
    demo = {f.name: f.metadata["demo"] for f in options if f.metadata["demo"] is not None}
    parser.set_defaults(**saved or (demo if first.model == "demo" else {}))
    config = Config(**vars(parser.parse_args(argv)))
    for f, option in options.items():
        value, low = getattr(config, f.name), f.metadata["low"]
        if low is not None and not value >= low: parser.error(f"{option} {value}: at least {low} is needed")
        if value != saved.get(f.name, value) and f.name not in "out save_every device show audit".split():
            parser.error(f"{option} {value}: the run to resume has {saved[f.name]}")
    if not 0 < config.fraction <= 1: parser.error("--fraction must lie in (0, 1]")
    if "{question}" not in config.prompt: parser.error(f"--prompt {config.prompt!r}: it lacks {{question}}")
    model = os.path.basename(config.model.rstrip("/"))
    config.out = config.out or f"runs/{model}-{config.select}-{config.seed}-{time.strftime('%m%d-%H%M%S')}"
    return config
def main(argv=None):
    """Runs the command line; bad input ends in one line on stderr and exit status 2."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try: train(parse(argv))
    except (BadInput, torch.cuda.OutOfMemoryError, KeyboardInterrupt) as error:
        said = {KeyboardInterrupt: "stopped; --resume goes on from the last checkpoint", BadInput: str(error)}
        short = "out of GPU memory; lower --micro-tokens, --prompts, --samples or --max-tokens"
        print("gmts.py:", " ".join(said.get(type(error), short).split())[:1000], file=sys.stderr)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 2)
if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)                                      # gloo's threads can abort Python's own way out
