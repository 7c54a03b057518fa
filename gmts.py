#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""GMTS: reinforcement learning on only the 20% of the sampled tokens with the largest gradients.

A language model answers each question several times, a verifier calls each answer right or wrong,
and the policy gradient makes the tokens of better answers likelier. Most tokens hardly matter:
their gradient is near zero. Gradient Magnitude-based Token Selection (GMTS, arXiv 2608.30632)
estimates the size of every token's gradient without a backward pass,

    delta_t = | H_t * omega_t |     H_t      entropy of the policy at token t
                                    omega_t  coefficient of grad log pi(y_t) in the policy gradient

and trains on the 20% of the tokens with the largest delta. Entropy can stand in for the norm of
grad log pi(y_t): at the logits the mean of its square is 1 - sum pi^2, at most 1 - exp(-H). What to
know beside the paper:
1. Groups whose answers are all equally good, which carry no signal, leave the batch before the
   ranking, for every selector: 20% means 20% of the tokens that can teach something.
2. Ranking and denominator are of the whole batch, as the paper's text has it; the authors' code
   ranks inside each question and divides by all tokens. A token with a score of 0 is never kept.
3. `--select exact`, an addition, ranks by the true norm of the gradient at the logits instead of H.
4. One recipe for every model but the demo: learning rate 1e-6, and no KL term without --beta.

Sections: 1 the formulas, 2 sampling, 3 the update, 4 the training loop; that is the method. Then
5 settings, 6 data and models, 7 the demo, 8 the verifier, each of which can be skipped.

Letters for shapes: P prompts, G answers to each, N = P * G answers in all, L prompt tokens,
T answer tokens, V vocabulary, D width of the model, K kept tokens.
"""

import argparse
import contextlib
import csv
import hashlib
import importlib.util
import inspect
import json
import math
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, set_seed
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# ---- 1 The formulas: tensors in, tensors out; each can be pasted alone ---------------------------


def group_advantages(rewards):
    """How much better an answer is than its group: rewards (P, G), finite -> advantages (P, G).

        A = (r - mean) / (std + 1e-6)     population std of the group     GRPO, arXiv 2402.03300

    Exactly 0 where a group's rewards are all equal, however their mean is rounded.
    """
    rewards = rewards.float()  # (P, G)
    mean = rewards.mean(dim=1, keepdim=True)  # (P, 1)
    std = rewards.std(dim=1, keepdim=True, correction=0)  # (P, 1)
    all_equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)  # (P, 1)
    return torch.where(all_equal, 0.0, (rewards - mean) / (std + 1e-6))  # (P, G)


def token_stats(logits, tokens, temperature=1.0):
    """Log-probability, entropy and gradient norm of each token, float32.

    logits (..., V) predict tokens (...) in [0, V) -> three tensors (...). With
    pi = softmax(logits / temperature), y the token and e_y its one-hot vector:

        logprob         = log pi(y)
        entropy         = - sum pi log pi                                           in nats
        logit_grad_norm = || d log pi(y) / d logits || = || e_y - pi || / temperature
                        = sqrt( (1 - pi(y))^2 + sum of the other pi^2 ) / temperature
    """
    logp = (logits.float() / temperature).log_softmax(dim=-1)  # (..., V)
    probs = logp.exp()  # (..., V)
    y = tokens.unsqueeze(-1)  # (..., 1)
    logprob = logp.gather(-1, y).squeeze(-1)  # (...)
    # A forbidden token has pi = 0 and log pi = -inf, whose product would be NaN.
    entropy = -(probs * logp.clamp_min(-1e30)).sum(dim=-1)  # (...)
    # 1 - pi(y) is taken as the sum of the others: no cancellation where pi(y) is nearly 1.
    others = probs.scatter(-1, y, 0.0)  # (..., V)
    logit_grad_norm = torch.hypot(others.sum(dim=-1), others.norm(dim=-1)) / temperature  # (...)
    return logprob, entropy, logit_grad_norm


def policy_weight(
    logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28, ref_logprobs=None, beta=0.0
):
    """The coefficient of grad log pi(y_t) in the policy gradient: tensors of one shape -> omega.

        omega = r * A * 1[not clipped] + beta * (pi_ref / pi - 1)     r = pi / pi_old

    Clipped: r > 1 + clip_high where A > 0, r < 1 - clip_low where A < 0 (PPO with DAPO's bounds).
    On policy (--updates 1, the default) r is 1, nothing is clipped, and without KL omega is A.
    """
    ratio = (logprobs - old_logprobs).exp()
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    omega = torch.where(too_high | too_low, 0.0, ratio * advantages)
    if beta > 0:
        omega = omega + beta * ((ref_logprobs - logprobs).exp() - 1)
    return omega


def token_scores(select, entropy, logit_grad_norm, omega):
    """What tokens are ranked by: tensors of one shape -> scores >= 0 of that shape."""
    if select == "gmts":
        return entropy * omega.abs()  # delta = |H * omega|, arXiv 2608.30632
    if select == "entropy":
        return entropy  # H alone, the "80/20 rule", arXiv 2506.01939
    if select == "exact":
        return logit_grad_norm * omega.abs()  # the true norm of the gradient at the logits
    if select == "random":
        return 1 - torch.rand_like(entropy)  # in (0, 1]: a score of 0 is never kept
    if select == "all":
        return torch.ones_like(entropy)  # every token, with fraction 1
    raise ValueError(f"unknown selector {select!r}: gmts, entropy, exact, random or all")


def select_top(scores, mask, fraction):
    """The ceil(fraction * tokens) highest scores among the tokens in mask.

    scores and mask (bool) of one shape, 0 < fraction <= 1 -> keep (bool), that shape. Of equal
    scores the earlier wins; 0 is never kept; NaN ranks first, so that it shows in the gradient.
    Ranks, not a quantile: if most scores are 0, all are >= their 80% quantile.
    """
    count = math.ceil(round(fraction * int(mask.sum()), 6))  # 0.2 * 35 is 7.000000000000001
    ranked = torch.where(mask, scores, 0.0).flatten()  # (M,)
    order = ranked.argsort(descending=True, stable=True)  # (M,)
    keep = torch.zeros_like(ranked, dtype=torch.bool)  # (M,)
    keep[order[:count]] = True
    return (keep & ~(ranked <= 0)).view_as(mask)


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    denominator,
    clip_low,
    clip_high,
    ref_logprobs=None,
    beta=0.0,
):
    """The clipped objective of the kept tokens, negated: tensors of one shape -> scalar.

       - sum [ min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - beta (e^d - d - 1) ] / denominator

    denominator: all tokens kept for this update. d = log pi_ref - log pi; its term estimates
    KL(pi || pi_ref) at the kept tokens (k3, joschu.net/blog/kl-approx.html). The gradient is
    - sum omega grad log pi / denominator.
    """
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if beta > 0:
        d = ref_logprobs - logprobs
        objective = objective - beta * (d.exp() - d - 1)
    return -objective.sum() / denominator


# ---- 2 Sampling: a plain loop whose logits give every token's statistics for free ----------------


@dataclass
class Batch:
    """A rollout: P prompts, G sampled answers to each, and what is known about every token."""

    prompt_ids: torch.Tensor  # (P, L) padded on the left
    prompt_mask: torch.Tensor  # (P, L) 1 on tokens, 0 on padding
    prompt_index: torch.Tensor  # (N,) the prompt of each answer
    tokens: torch.Tensor  # (N, T) the answers with their end token; what follows it is padding
    mask: torch.Tensor  # (N, T) True on the tokens of an answer
    logprobs: torch.Tensor  # (N, T) of the policy that sampled: PPO's old log-probabilities
    entropy: torch.Tensor  # (N, T) of the same policy, see token_stats
    logit_grad_norm: torch.Tensor  # (N, T) of the same policy, see token_stats
    rewards: torch.Tensor  # (P, G)
    advantages: torch.Tensor  # (N, 1)


def forward(model, ids, attention, cache=None):
    """Logits (n, S, V) after each of the S newest tokens, ids (n, S).

    attention (n, cached + S) marks, with 1, all tokens that are no padding, those in the cache too.
    """
    positions = (attention.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]  # (n, S)
    inputs = {"input_ids": ids, "attention_mask": attention, "position_ids": positions}
    # transformers is renaming the argument past_key_values to cache.
    renamed = "cache" in inspect.signature(model.forward).parameters
    inputs["cache" if renamed else "past_key_values"] = cache
    return model(**inputs, use_cache=cache is not None).logits


def prompt_cache(model, prompt_ids, prompt_mask, prompt_index):
    """Key/value cache of all but the last token of prompts (P, L), a row for each answer (N,).

    A prompt is computed once for all its answers; in training it collects all their gradients. Its
    last token is left to the answers' pass, which then yields every logit that they need.
    """
    cache = DynamicCache(config=model.config)
    if prompt_ids.shape[1] > 1:
        # Only the cache is wanted: the hook runs the output layer on no positions at all.
        output_layer = model.get_output_embeddings()
        with output_layer.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, :0],)):
            forward(model, prompt_ids[:, :-1], prompt_mask[:, :-1], cache)
        cache.reorder_cache(prompt_index)
    return cache


def draw(logits, temperature):
    """A token for each row of logits (n, V) -> (n,); at temperature 0 the likeliest."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    # By inverting the CDF: one random number a row, where torch.multinomial draws V of them.
    cdf = (logits.float() / temperature).softmax(dim=-1).cumsum(dim=-1)  # (n, V)
    point = torch.rand_like(cdf[:, :1]).clamp_max(1 - 1e-6) * cdf[:, -1:]  # (n, 1), below the end
    token = torch.searchsorted(cdf, point, right=True).squeeze(1)  # (n,)
    return token.clamp_max(logits.shape[1] - 1)  # NaN logits


@torch.no_grad()
def sample(model, prompt_ids, prompt_mask, samples, max_tokens, stop_ids, temperature):
    """Samples G answers to each left-padded prompt (P, L); rows i * G to i * G + G - 1 answer i.

    Returns tokens, mask, logprobs, entropy and logit_grad_norm, (N, max_tokens) each. The token of
    stop_ids that ends an answer belongs to it. Temperature 0 takes the likeliest token.
    """
    device, L = prompt_ids.device, prompt_ids.shape[1]
    prompt_index = torch.arange(len(prompt_ids), device=device).repeat_interleave(samples)  # (N,)
    rows = torch.arange(len(prompt_index), device=device)  # (n,) the answers still in the batch
    stop = torch.tensor(sorted(stop_ids), device=device)  # (stops,)
    tokens = stop[0].repeat(len(rows), max_tokens)  # (N, T)
    mask = torch.zeros_like(tokens, dtype=torch.bool)  # (N, T)
    stats = torch.zeros(3, len(rows), max_tokens, device=device)  # (3, N, T)

    cache = prompt_cache(model, prompt_ids, prompt_mask, prompt_index)
    attention = F.pad(prompt_mask[prompt_index], (0, max_tokens), value=1)  # (N, L + T)
    token = prompt_ids[prompt_index, -1]  # (N,)
    running = torch.ones_like(token, dtype=torch.bool)  # (N,)
    bar = tqdm(range(max_tokens), "tokens", leave=False, disable=None)
    for t in bar:
        logits = forward(model, token[:, None], attention[:, : L + t], cache)[:, -1]  # (n, V)
        token = draw(logits, temperature)  # (n,)
        stats[:, rows, t] = torch.stack(token_stats(logits, token, temperature or 1.0))  # (3, n)
        tokens[rows, t] = token
        mask[rows, t] = running
        running = running & ~torch.isin(token, stop)  # (n,)

        # Answers that have ended leave the batch. To find them a CPU has to wait for its GPU, so
        # there it looks only every eighth token.
        if device.type == "cpu" or t % 8 == 7:
            stay = running.nonzero().squeeze(1)  # (n,)
            bar.set_postfix(running=len(stay))
            if len(stay) == 0:
                break
            if len(stay) < len(rows):
                rows, token, running = rows[stay], token[stay], running[stay]
                attention = attention[stay]
                cache.reorder_cache(stay)
    bar.close()
    return tokens, mask, *torch.where(mask, stats, 0.0)


def rollout(run, problems, samples, temperature):
    """Samples answers to problems [(prompt ids, answer), ...] and rewards them -> Batch.

    run (section 5) holds the model, its tokenizer, the reward and the settings.
    """
    config, device = run.config, run.model.device
    problems = sorted(problems, key=lambda problem: len(problem[0]))
    widths = [len(ids) + config.max_tokens for ids, _ in problems]
    L = len(problems[-1][0])
    padded = [[-1] * (L - len(ids)) + ids for ids, _ in problems]  # -1: no token
    padded = torch.tensor(padded, device=device)  # (P, L)
    prompt_ids, prompt_mask = padded.clamp_min(0), (padded >= 0).long()  # (P, L) each

    # Sample. A row more than twice as wide does not pad the others: it starts another part.
    sampled, start = [], 0
    while start < len(problems):
        end = sum(width <= 2 * widths[start] for width in widths)
        L = widths[end - 1] - config.max_tokens
        part = prompt_ids[start:end, -L:], prompt_mask[start:end, -L:]  # (end - start, L) each
        limits = config.max_tokens, run.stop_ids, temperature
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            sampled.append(sample(run.model, *part, samples, *limits))
        start = end
    tokens, mask, *stats = (torch.cat(parts) for parts in zip(*sampled, strict=True))  # (N, T)

    # Reward.
    ids = [row[real].tolist() for row, real in zip(tokens.cpu(), mask.cpu(), strict=True)]
    texts = run.tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards = []
    for i, text in enumerate(texts):
        with explain(f"the reward of the completion {text[:60]!r}"):
            rewards.append(float(run.reward(text, problems[i // samples][1])))
            if not math.isfinite(rewards[-1]):
                raise ValueError(f"{rewards[-1]} is not a finite number")
    rewards = torch.tensor(rewards, device=device).view(-1, samples)  # (P, G)
    advantages = group_advantages(rewards).view(-1, 1)  # (N, 1)
    prompt_index = torch.arange(len(problems), device=device).repeat_interleave(samples)  # (N,)
    return Batch(prompt_ids, prompt_mask, prompt_index, tokens, mask, *stats, rewards, advantages)


# ---- 3 The update: score, select, step -----------------------------------------------------------
# learn() scores and selects by the formulas, and has policy_gradient() compute the gradient. That
# goes through the answers in micro_batches(), each a forward pass of kept_logits().

LOGITS_PER_TOKEN = 2**15  # a pass makes at most --micro-tokens times this: 1 GB in float32


def micro_batches(model, batch, keep, config):
    """Cuts the answers that have tokens in keep (N, T) into micro-batches: yields rows (n,).

    A micro-batch holds at most --micro-tokens tokens, prompts and padding included, and logits in
    proportion; an answer beyond that goes alone. Answers to the same prompt stay side by side, so
    that they can share its computation.
    """
    counts = keep.sum(dim=1)  # (N,) kept tokens
    ends = torch.arange(1, keep.shape[1] + 1, device=keep.device)  # (T,)
    lengths = (keep * ends).amax(dim=1)  # (N,) up to the last kept token: a pass can stop there
    P, L = batch.prompt_ids.shape
    index = batch.prompt_index  # (N,)
    longest = torch.zeros_like(index).scatter_reduce(0, index, lengths, "amax")[index]  # (N,)
    # The groups with the longest answers first: little padding, and none is longer than the first.
    order = (longest * P + index).argsort(descending=True, stable=True)  # (N,)
    rows = order[counts[order] > 0]  # (n,)
    answer_logits = int(counts.max()) * model.get_output_embeddings().weight.shape[0]
    while len(rows) > 0:
        answer_tokens = L + int(longest[rows[0]])
        size = config.micro_tokens // answer_tokens
        size = max(1, min(size, config.micro_tokens * LOGITS_PER_TOKEN // answer_logits))
        yield rows[:size]
        rows = rows[size:]


def kept_logits(model, batch, rows, keep, config):
    """A forward pass over the answers rows (n,) that ends in the logits of their kept tokens alone.

    Returns row (K,), column (K,) and the logits (K, V), which predict batch.tokens[row, column]:

        input      prompt ...  last prompt token   y_1   y_2  ...  y_T-1
        predicts                      y_1          y_2   y_3  ...  y_T
    """
    answer, column = keep[rows].nonzero(as_tuple=True)  # (K,), (K,): which of rows, which token
    T = int(column.max()) + 1
    prompts, index = batch.prompt_index[rows].unique(return_inverse=True)  # (p,), (n,)
    L = int(batch.prompt_mask[prompts].sum(dim=1).max())
    prompt_ids, prompt_mask = batch.prompt_ids[prompts, -L:], batch.prompt_mask[prompts, -L:]
    answers = batch.tokens[rows, : T - 1]  # (n, T-1)
    ids = torch.cat([prompt_ids[index], answers], dim=1)  # (n, L+T-1)
    attention = torch.cat([prompt_mask[index], torch.ones_like(answers)], dim=1)  # (n, L+T-1)

    # A hook in front of the output layer passes on the hidden states of kept tokens alone: logits
    # (n, T, V) never exist, and the model's own forward does all the rest, whatever its kind.
    def choose(_, inputs):
        return (inputs[0][:, -T:][answer, column],)  # (n, S, D) -> (K, D)

    # Only attention layers can share a prompt's cache in a backward pass, recurrent ones cannot.
    layers = DynamicCache(config=model.config).layers
    shared = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
        cache = prompt_cache(model, prompt_ids, prompt_mask, index) if shared else None
        ids = ids[:, L - 1 :] if shared else ids  # (n, T) if shared
        with model.get_output_embeddings().register_forward_pre_hook(choose):
            logits = forward(model, ids, attention, cache)  # (K, V)
    return rows[answer], column, logits


@torch.no_grad()
def score_tokens(model, batch, mask, config):
    """token_stats of the tokens in mask (N, T) by the model as it is now: three (N, T)."""
    stats = torch.zeros(3, *mask.shape, device=mask.device)  # (3, N, T)
    for rows in micro_batches(model, batch, mask, config):
        row, column, logits = kept_logits(model, batch, rows, mask, config)
        scored = token_stats(logits, batch.tokens[row, column], config.temperature)
        stats[:, row, column] = torch.stack(scored)  # (3, K)
    return stats.unbind()


def policy_gradient(model, batch, keep, denominator, config, ref_logprobs):
    """Adds the gradient of policy_loss over keep (N, T) to that of the parameters."""
    for rows in micro_batches(model, batch, keep, config):
        row, column, logits = kept_logits(model, batch, rows, keep, config)
        logits = logits.float() / config.temperature  # (K, V)
        logprobs = -F.cross_entropy(logits, batch.tokens[row, column], reduction="none")  # (K,)
        old, ref = batch.logprobs[row, column], ref_logprobs[row, column]  # (K,), (K,)
        advantages = batch.advantages[row, 0]  # (K,)
        clip = config.clip_low, config.clip_high
        policy_loss(logprobs, old, advantages, denominator, *clip, ref, config.beta).backward()


def learn(run, batch):
    """Takes --updates optimizer steps on a rollout, each on its share of the groups.

    Returns figures for the log. With --updates 1, the default, everything here is on policy.
    """
    config, model = run.config, run.model
    advantages = batch.advantages.expand_as(batch.mask)  # (N, T)
    trained, norms = torch.zeros_like(batch.mask), []  # (N, T) kept by any of the updates

    # Groups whose answers are all equally good leave the batch: they teach nothing.
    informative = batch.prompt_index[batch.advantages[:, 0] != 0].unique()  # (groups,)
    for update in range(config.updates):
        groups = informative[update :: config.updates]  # long prompts stand last: to each its share
        candidates = batch.mask & torch.isin(batch.prompt_index, groups)[:, None]  # (N, T)

        # Score (N, T). Until the first optimizer step the model is still the one that sampled.
        logprobs, entropy, logit_grad_norm = batch.logprobs, batch.entropy, batch.logit_grad_norm
        if update > 0:
            logprobs, entropy, logit_grad_norm = score_tokens(model, batch, candidates, config)
        ref_logprobs = batch.logprobs  # (N, T) a placeholder: a beta of 0 does not look at it
        if config.beta > 0:
            ref_logprobs, *_ = score_tokens(run.reference, batch, candidates, config)
        clip = config.clip_low, config.clip_high
        omega = policy_weight(
            logprobs, batch.logprobs, advantages, *clip, ref_logprobs, config.beta
        )
        scores = token_scores(config.select, entropy, logit_grad_norm, omega)  # (N, T)

        # Select, among the tokens of all these groups at once.
        keep = select_top(scores, candidates, 1.0 if config.select == "all" else config.fraction)
        trained |= keep
        run.shown = batch, keep, scores * candidates

        # Step, unless the gradient is not finite.
        if keep.any():
            policy_gradient(model, batch, keep, keep.sum(), config, ref_logprobs)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            norms.append(float(norm))
            if math.isfinite(norms[-1]):
                run.optimizer.step()
            run.optimizer.zero_grad()

    ranked = (batch.mask & torch.isin(batch.prompt_index, informative)[:, None]).sum()
    return {
        "informative": len(informative) / len(batch.prompt_ids),
        "entropy_kept": float(batch.entropy[trained].sum() / trained.sum().clamp_min(1)),
        "kept": float(trained.sum() / ranked.clamp_min(1)),
        "grad_norm": sum(norms) / max(1, len(norms)),
    }


# ---- 4 The training loop -------------------------------------------------------------------------


def evaluate(run):
    """Answers each evaluation question --eval-samples times -> figures for the log."""
    config, samples = run.config, run.config.eval_samples
    torch.manual_seed(config.seed)  # the same draws each time; train_step sets its own seed
    size = max(1, config.prompts * config.samples // samples)  # as many answers as in training
    rewards = torch.zeros(0, samples)
    with tqdm(total=len(run.eval_problems), desc="questions", leave=False, disable=None) as bar:
        for start in range(0, len(run.eval_problems), size):
            problems = run.eval_problems[start : start + size]
            batch = rollout(run, problems, samples, config.temperature if samples > 1 else 0.0)
            rewards = torch.cat([rewards, batch.rewards.cpu()])  # (questions, samples)
            bar.update(len(problems))
            bar.set_postfix(accuracy=float(rewards.mean()))
    return {"accuracy": float(rewards.mean()), "pass_at_k": float(rewards.amax(dim=1).mean())}


def train_step(run):
    """A rollout and its updates -> a row of the log. All randomness follows from (seed, step)."""
    config = run.config
    start = time.perf_counter()
    set_seed(int(np.random.SeedSequence([config.seed, run.step]).generate_state(1)[0]))

    # The next problems. Each epoch goes through all of them in another order.
    problems = []
    for i in range(run.step * config.prompts, (run.step + 1) * config.prompts):
        epoch, place = divmod(i, len(run.problems))
        if place == 0 or not problems:
            order = np.random.default_rng([config.seed, epoch]).permutation(len(run.problems))
        problems.append(run.problems[order[place]])

    # A linear warm-up, times a linear decay from 1 at the first step towards --lr-end.
    lr = config.lr * min(1, (run.step + 1) / max(1, config.warmup))
    lr *= 1 - (1 - config.lr_end) * run.step / config.steps
    run.optimizer.param_groups[0]["lr"] = lr

    batch = rollout(run, problems, config.samples, config.temperature)
    figures = learn(run, batch)
    seconds = time.perf_counter() - start
    tokens, device = int(batch.mask.sum()), batch.tokens.device
    stop = torch.tensor(sorted(run.stop_ids), device=device)  # (stops,)
    ended = (torch.isin(batch.tokens, stop) & batch.mask).any(dim=1)  # (N,)
    return {
        "step": run.step + 1,
        "reward": float(batch.rewards.mean()),
        "truncated": 1 - float(ended.float().mean()),
        "length": tokens / len(batch.tokens),
        "entropy": float(batch.entropy.sum()) / tokens,
        "lr": lr,
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "peak_gb": torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0,
        **figures,
    }


def train(config):
    """Trains as the configuration says -> the rows of the log."""
    run = prepare(config)
    while True:
        # Evaluate, print and save the newest row: of step 0, of a checkpoint, or just trained.
        row, last = run.rows[-1], run.step == config.steps
        due = last or run.step % (config.eval_every or config.steps) == 0
        if due and "accuracy" not in row:
            row.update(evaluate(run))
        log_row(run)
        if last or run.step > 0 and run.step % config.save_every == 0:
            save_checkpoint(run)
        norms = [past["grad_norm"] for past in run.rows if past.get("kept")][-10:]  # of updates
        if len(norms) == 10 and not any(map(math.isfinite, norms)):
            raise BadInput("the gradient was not finite in ten steps: lower --lr")
        if last:
            break
        run.rows.append(train_step(run))
        run.step += 1
    before, after = run.rows[0]["accuracy"], row["accuracy"]
    print(f"accuracy {before:.3f} -> {after:.3f}; the model is in {checkpoints(config.out)[-1]}")
    return run.rows


# ---- 5 Settings ----------------------------------------------------------------------------------

BOXED = "{question}\nPlease reason step by step, and put your final answer in \\boxed{}.\n"


@dataclass
class Config:
    """Each setting is a flag: max_tokens is --max-tokens. Its help is the comment behind it."""

    model: str = "demo"  # hub name, local folder, or demo: a small adder made on the spot
    data: str = "gsm8k"  # gsm8k, math, demo, or a .jsonl or .json file
    eval_data: str = ""  # the same to evaluate on; if empty, its own test set or a held-out tenth
    prompt: str = BOXED  # what the model is asked; {question} is put in
    template: str = ""  # JSON for the chat template, such as {"enable_thinking": false}
    reward: str = ""  # FILE.py:FUNCTION, f(completion, answer) -> number; if empty, the verifier
    select: str = "gmts"  # what ranks the tokens
    fraction: float = 0.2  # share of the tokens to train on
    prompts: int = 32  # questions a step (P)
    samples: int = 16  # answers to each question (G)
    max_tokens: int = 512  # longest answer in tokens (T)
    temperature: float = 1.0  # of sampling; an evaluation with one answer each is greedy
    lr: float = 1e-6  # learning rate of AdamW
    lr_end: float = 1.0  # share of it that is left at the end, after a linear decay
    warmup: int = 10  # steps of linear warm-up
    steps: int = 200  # rollouts to train on
    updates: int = 1  # optimizer steps a rollout, each on a share of its groups
    beta: float = 0.0  # weight of the KL term against the initial model
    clip_low: float = 0.2  # the ratio is clipped below 1 - this
    clip_high: float = 0.28  # the ratio is clipped above 1 + this
    micro_tokens: int = 8192  # tokens in a forward and backward pass; lower it if memory runs out
    grad_clip: float = 1.0  # largest gradient norm
    eval_every: int = 20  # steps between evaluations; 0: only before and after
    eval_size: int = 500  # questions to evaluate on
    eval_samples: int = 1  # answers to each: 1 is greedy, K gives mean accuracy and pass@K
    save_every: int = 20  # steps between checkpoints
    log_every: int = 1  # steps between printed lines; metrics.csv has all
    seed: int = 0  # of everything random
    out: str = ""  # folder of the run; if empty, runs/MODEL-SELECT-SEED-TIME
    show: bool = False  # after each evaluation print two sampled answers, kept tokens marked
    resume: bool = False  # go on from the last checkpoint in --out, with that run's settings
    device: str = "auto"  # cpu, cuda, ...; auto takes a GPU where there is one
    dtype: str = "auto"  # of matrix products; auto: bfloat16 on a GPU


# The demo has defaults of its own.
DEMO = """--data demo --prompt {question} --samples 8 --max-tokens 34 --lr 3e-4 --lr-end 0.1
--warmup 5 --steps 300 --eval-every 60 --eval-size 1000 --log-every 10""".split()
SELECTORS = ("gmts", "entropy", "exact", "random", "all")
CHOICES = {"select": SELECTORS, "dtype": ("auto", "float32", "bfloat16")}
# No number may be negative, and these must not be 0.
POSITIVE = """fraction prompts samples max_tokens temperature updates micro_tokens grad_clip
eval_size eval_samples save_every log_every""".split()
# What may differ from the run that --resume continues.
CHANGEABLE = "out resume show device micro_tokens eval_every save_every log_every".split()


@dataclass
class Run:
    """What a training run is made of; `prepare` fills it in."""

    config: Config
    model: torch.nn.Module  # the policy, with float32 weights
    reference: torch.nn.Module | None  # the model as it began, for the KL term of --beta
    tokenizer: transformers.PreTrainedTokenizerBase
    stop_ids: set  # tokens that end an answer
    optimizer: torch.optim.Optimizer
    reward: Callable  # reward(completion, answer) -> number
    problems: list  # to train on: [(token ids of the prompt, reference answer), ...]
    eval_problems: list  # to evaluate on, in the same form
    data_hash: str  # of both, so that no run is resumed on other data
    step: int = 0  # rollouts trained on so far
    rows: list = field(default_factory=lambda: [{"step": 0}])  # the log, a dict a step
    shown: tuple | None = None  # (batch, keep, scores) of the last update, for --show
    printed: int = 0  # lines of the log on the screen


class BadInput(ValueError):
    """Something that the user can correct: it ends in one line on stderr and exit status 2."""


@contextlib.contextmanager
def explain(what):
    """Turns whatever fails inside into a BadInput that begins with `what`."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a user's reward may call sys.exit
        raise BadInput(f"{what}: {str(error) or type(error).__name__}") from error


def parse(argv):
    """The command line -> Config: flags, else the settings of the run to resume, or the demo's."""
    helps = dict(re.findall(r"^    (\w+): .*  # (.*)$", inspect.getsource(Config), re.M))
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser("gmts.py", allow_abbrev=False, formatter_class=form)
    parser.error = lambda message: parser.exit(2, f"gmts.py: {message}; --help lists the flags\n")
    flags = {f.name: "--" + f.name.replace("_", "-") for f in fields(Config)}
    for f in fields(Config):
        kind = {"type": f.type, "choices": CHOICES.get(f.name)}
        if f.type is bool:
            kind = {"action": "store_true"}
        parser.add_argument(flags[f.name], default=f.default, help=helps[f.name], **kind)

    first = parser.parse_args(argv)
    saved = vars(parser.parse_args(DEMO)) if first.model == "demo" else {}
    if first.resume:
        if not checkpoints(first.out):
            parser.error(f"--resume: there is no checkpoint in --out {first.out!r}")
        with explain("--resume"):
            saved = json.loads(Path(first.out, "config.json").read_text()) | {"resume": True}
            if set(saved) != set(flags):
                odd = ", ".join(sorted(set(saved) ^ set(flags)))
                raise ValueError(f"{first.out}/config.json is of another version: {odd}")
    parser.set_defaults(**saved)
    config = Config(**vars(parser.parse_args(argv)))
    for name, value in vars(config).items():
        more_steps = name == "steps" and value > saved.get(name, value)
        if first.resume and name not in CHANGEABLE and value != saved[name] and not more_steps:
            parser.error(f"{flags[name]} {value}: the run to resume has {saved[name]}")
        if not isinstance(value, str) and not (value > 0 if name in POSITIVE else value >= 0):
            parser.error(f"{flags[name]} {value} is too small")
    if config.fraction > 1:
        parser.error(f"--fraction {config.fraction} is larger than 1")
    if config.samples < 2:
        parser.error("--samples 1 makes groups of one answer, which teach nothing")
    if config.seed >= 2**32:
        parser.error(f"--seed {config.seed} is not below 2**32")
    if "{question}" not in config.prompt:
        parser.error(f"--prompt {config.prompt!r} lacks {{question}}")
    return config


# ---- 6 Data, models, checkpoints, log ------------------------------------------------------------

GSM8K = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
MATH = "https://media.githubusercontent.com/media/openai/prm800k/main/prm800k/math_splits/"
DOWNLOADS = {
    "gsm8k": GSM8K + "train.jsonl",  # 7,473 problems
    "gsm8k-test": GSM8K + "test.jsonl",  # 1,319
    "math": MATH + "train.jsonl",  # 12,000
    "math-test": MATH + "test.jsonl",  # 500
}
QUESTIONS = ("question", "problem", "prompt", "input", "content")
ANSWERS = ("answer", "answerkey", "final_answer", "target", "ground_truth", "label", "correct")
ANSWERS += ("reward_model", "solution")
CONVERT = {".parquet": "read_parquet", ".csv": "read_csv", ".gz": "read_json"}


def read_options(options):
    """Multiple choice in any of its usual shapes -> {letter: text}."""
    if isinstance(options, dict) and "text" in options:  # {"label": [...], "text": [...]}
        return dict(zip(options["label"], options["text"], strict=True))
    if isinstance(options, list) and isinstance(options[0], dict):  # [{"label": ..., "text": ...}]
        return {option["label"]: option["text"] for option in options}
    if isinstance(options, list):
        return {chr(ord("A") + i): text for i, text in enumerate(options)}
    return options  # {"A": ..., "B": ...}


def read_record(record):
    """One record of a data file -> (question, answer); a question is a text or messages."""
    record = {name.lower(): value for name, value in record.items() if value not in (None, "", [])}
    question = next((record[name] for name in QUESTIONS if name in record), None)
    column = next((name for name in ANSWERS if name in record), None)
    answer, options = record.get(column), record.get("options", record.get("choices"))
    if isinstance(question, dict):  # CommonsenseQA
        question, options = question["stem"], question["choices"]
    if isinstance(answer, dict):  # verl
        answer = answer.get("ground_truth")
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if not isinstance(question, (str, list)) or not question:
        raise BadInput(f"no question in any of the columns {', '.join(QUESTIONS)}")
    if not isinstance(answer, (str, int, float)) or answer != answer or not str(answer).strip():
        raise BadInput(f"no answer in any of the columns {', '.join(ANSWERS)}")
    is_number = not isinstance(answer, str)
    answer = str(answer).strip()
    if column == "solution" or re.search(r"####|\\(boxed|fbox)", answer):
        answer = extract_answer(answer)
        if answer is None:
            raise BadInput("no answer: the solution has no \\boxed{}, #### or 'answer is'")
    if isinstance(question, str):
        question = f"{record.get('body', '')} {question}".strip()  # SVAMP has its facts in Body
        if options:
            options = read_options(options)
            if answer not in options:  # an index from 0, or the text
                texts = [str(text) for text in options.values()]
                is_index = answer.isdigit() and (is_number or answer not in texts)
                answer = [*options][int(answer) if is_index else texts.index(answer)]
            question += "".join(f"\n({letter}) {text}" for letter, text in options.items())
    return question, answer


def load_problems(source):
    """demo, a name (downloaded once, into torch.hub's cache) or a file -> [(question, answer)]."""
    if source == "demo":
        return demo_problems()
    path = Path(source)
    if path.suffix in CONVERT:
        line = f"pandas.{CONVERT[path.suffix]}({source!r}).to_json('data.jsonl', orient='records', "
        raise BadInput(f"data {source}: only .jsonl and .json are read; {line}lines=True) converts")
    with explain(f"data {DOWNLOADS.get(source, source)}"):
        if source in DOWNLOADS:
            path = Path(torch.hub.get_dir(), "gmts", source + ".jsonl")
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                torch.hub.download_url_to_file(DOWNLOADS[source], str(path), progress=False)
        text = path.read_text(encoding="utf-8-sig")
        array = text.lstrip().startswith("[")
        problems = []
        for number, record in enumerate(json.loads(text) if array else text.split("\n"), 1):
            with explain(f"{'record' if array else 'line'} {number}"):
                if array or record.strip():
                    problems.append(read_record(record if array else json.loads(record)))
    return problems


def split_problems(config):
    """-> problems to train on, problems to evaluate on; no question is in both."""
    if config.data == config.eval_data:
        raise BadInput("--eval-data is the same as --data; without it a tenth is held out")
    train = load_problems(config.data)
    if config.eval_data or config.data in DOWNLOADS:
        test = load_problems(config.eval_data or config.data + "-test")
    else:
        test = train[::10]
    held_out = {json.dumps(question) for question, _ in test}
    train = [problem for problem in train if json.dumps(problem[0]) not in held_out]
    if not (train and test):
        raise BadInput(f"data {config.data}: too few questions to train and evaluate on")
    return train, test[: config.eval_size]


def load_reward(path):
    """FILE.py:FUNCTION -> the function; the file may import modules beside it."""
    with explain(f"--reward {path} (FILE.py:FUNCTION)"):
        file, _, name = path.rpartition(":")
        sys.path.insert(0, str(Path(file).resolve().parent))
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return getattr(module, name)


def load_model(name, device, problems):
    """A local folder, a hub name (Qwen's without "Qwen/" too), or demo -> model, tokenizer."""
    if name == "demo":
        with explain("the demo's model knows sums such as 348+214= only; --model names another"):
            model, tokenizer = demo_model(problems)
        return model.to(device).eval(), tokenizer
    name = name if "/" in name or Path(name).is_dir() else "Qwen/" + name
    with explain(f"model {name} (a local folder or a name on the hub)"):
        options = {"dtype": torch.float32, "output_loading_info": True}
        model, report = AutoModelForCausalLM.from_pretrained(name, **options)
        tokenizer = AutoTokenizer.from_pretrained(name)
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"])[:3])
            raise ValueError(f"the checkpoint has no weights for {missing}")
        if not all(weight.isfinite().all() for weight in model.parameters()):
            raise ValueError("there are weights that are not finite")
        text_config = model.config.get_text_config()
        if getattr(text_config, "output_router_logits", False):
            text_config.output_router_logits = False  # else forward adds a loss
        model = model.to(device).eval()  # eval: dropout would make every pass another policy
        check_sampling(model)
    return model, tokenizer


def check_sampling(model):
    """Refuses a model that, padded and with a cache, samples otherwise than its forward says."""
    ids = torch.tensor([[0, 0, 1], [1, 2, 3]], device=model.device)  # (2, 3)
    prompt_mask = (ids > 0).long()  # (2, 3)
    tokens, _, logprobs, *_ = sample(model, ids, prompt_mask, 1, 4, {-1}, 1.0)  # (2, 4) each
    for row, length in enumerate((1, 3)):
        whole = torch.cat([ids[row, -length:], tokens[row]])[None]  # (1, length + 4)
        with torch.no_grad():
            logits = forward(model, whole, torch.ones_like(whole))[0, length - 1 : -1]  # (4, V)
        error = (token_stats(logits, tokens[row])[0] - logprobs[row]).abs().max()
        if not error < 0.01:
            raise ValueError(f"{type(model).__name__} gives other logits with a cache")


def render(tokenizer, question, prompt="{question}", template=""):
    """A question, or messages, as the model reads them: a chat, if there is a template for it."""
    messages = question
    if isinstance(question, str):
        messages = [{"role": "user", "content": prompt.replace("{question}", question)}]
    if tokenizer.chat_template is None:
        return "\n".join(message["content"] for message in messages)
    with explain(f"the model's chat template, with --template {template!r}"):
        options = {"tokenize": False, "add_generation_prompt": True}
        options |= json.loads(template or "{}")
        return tokenizer.apply_chat_template(messages, **options)


def end_tokens(model, tokenizer):
    """The ids that end an answer: a model may have several, a chat template one of its own."""
    known = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(known if isinstance(known, list) else [known])} - {None}
    if tokenizer.chat_template:
        turns = [("user", "?"), ("assistant", "gmts"), ("user", "?")]
        text = render(tokenizer, [{"role": role, "content": text} for role, text in turns])
        ids = tokenizer(text.rpartition("gmts")[2].strip(), add_special_tokens=False).input_ids
        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        ends |= set(ids[:1]) & {*special, *tokenizer.all_special_ids}  # what closes the turn
    ends = {i for i in ends if i < model.get_input_embeddings().weight.shape[0]}
    if not ends:
        raise BadInput("the model has no end token: set eos_token in tokenizer_config.json")
    return ends


def context_length(model):
    """How many tokens prompt and answer may have together."""
    config = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):  # beyond, keys in the cache would be stale
        limits.append(rope.get("original_max_position_embeddings"))
        limits.append(getattr(config, "original_max_position_embeddings", None))
    return min((limit for limit in limits if limit), default=10**9)


def encode(model, tokenizer, problems, config):
    """Problems [(question, answer), ...] -> [(token ids of the prompt, answer), ...].

    Prompts that leave no room for an answer in the model's context are left out.
    """
    texts = [render(tokenizer, q, config.prompt, config.template) for q, _ in problems]
    prompts = tokenizer(texts, add_special_tokens=tokenizer.chat_template is None).input_ids
    if not all(prompts):
        raise BadInput(f"the tokenizer makes no tokens of {texts[prompts.index([])][:60]!r}")
    largest, known = max(map(max, prompts)), model.get_input_embeddings().weight.shape[0]
    if largest >= known:
        raise BadInput(f"the tokenizer has a token {largest}, the model {known} embeddings only")
    room = context_length(model) - config.max_tokens
    pairs = [(ids, answer) for ids, (_, answer) in zip(prompts, problems, strict=True)]
    pairs = [pair for pair in pairs if len(pair[0]) <= room]
    if not pairs:
        raise BadInput(f"no prompt fits into {room} tokens: the context less --max-tokens")
    return pairs


def open_folder(config):
    """Makes the run's folder, for this process alone, and keeps the settings in it."""
    name = f"{Path(config.model).name}-{config.select}-{config.seed}"
    config.out = config.out or f"runs/{name}-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(config.out)
    with explain(f"--out {folder} (a new folder; --resume goes on in an old one)"):
        if checkpoints(folder) and not config.resume:
            raise ValueError("it has a checkpoint")
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)  # open until this process ends
        with contextlib.suppress(ImportError):  # there is no fcntl on Windows
            import fcntl

            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "config.json").write_text(json.dumps(asdict(config), indent=1))


def prepare(config):
    """Device, reward, data, folder, model, optimizer and, with --resume, the checkpoint -> Run."""
    device = config.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    with explain(f"--device {config.device}"):
        torch.empty(0, device=device)
    best = "bfloat16" if device.startswith("cuda") else "float32"
    config.dtype = config.dtype.replace("auto", best)
    reward = load_reward(config.reward) if config.reward else is_correct
    train, test = split_problems(config)
    data_hash = hashlib.sha256(json.dumps([train, test]).encode()).hexdigest()
    open_folder(config)

    saved = checkpoints(config.out)[-1] if config.resume else None
    set_seed(config.seed)
    model, tokenizer = load_model(str(saved or config.model), device, train)
    reference = None
    if config.beta > 0:
        set_seed(config.seed)  # the demo makes the same model again; after a resume too
        reference, _ = load_model(config.model, device, train)
    problems = encode(model, tokenizer, train, config)
    eval_problems = encode(model, tokenizer, test, config)
    eval_problems.sort(key=lambda problem: len(problem[0]))  # for batches of like lengths
    stop_ids = end_tokens(model, tokenizer)
    # Each step sets the learning rate.
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0, fused=True)
    parts = config, model, reference, tokenizer, stop_ids, optimizer, reward
    run = Run(*parts, problems, eval_problems, data_hash)
    if saved:
        with explain(f"checkpoint {saved}"):
            state = torch.load(saved / "trainer.pt", map_location=device, weights_only=True)
            if state["data_hash"] != data_hash:
                raise ValueError("it was trained on other data")
            run.step, run.rows = state["step"], state["rows"]
            optimizer.load_state_dict(state["optimizer"])

    too_long = len(train) + len(test) - len(problems) - len(eval_problems)
    print_settings(run, too_long)
    return run


def checkpoints(folder):
    """The whole checkpoints in a run's folder, the newest last."""
    return sorted(Path(folder).glob("step-" + "[0-9]" * 6))


def save_checkpoint(run):
    """Writes OUT/step-NNNNNN: a model for transformers, and trainer.pt with optimizer and log.

    It gets its name when it is whole, and only then do older ones go.
    """
    older = checkpoints(run.config.out)
    path = Path(run.config.out, f"step-{run.step:06d}")
    if path in older:  # just resumed
        return
    part = path.with_suffix(".part")
    state = {"step": run.step, "rows": run.rows, "data_hash": run.data_hash}
    state["optimizer"] = run.optimizer.state_dict()
    with explain(f"checkpoint {path}"):
        try:
            run.model.save_pretrained(part)
            run.tokenizer.save_pretrained(part)
            torch.save(state, part / "trainer.pt")
            part.rename(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    for folder in older:
        shutil.rmtree(folder)


def print_settings(run, too_long):
    """What differs from the defaults comes first."""
    config = vars(run.config)
    for title, differs in (("settings", True), ("defaults", False)):
        names = [name for name in config if (config[name] != getattr(Config, name)) == differs]
        print(f"{title}:", ", ".join(f"{name} {config[name]!r}" for name in names))
    print(
        f"{run.model.num_parameters():,} parameters, {len(run.problems):,} problems to train on,"
        f" {len(run.eval_problems):,} to evaluate on, {too_long} left out as too long"
    )


HEADER = (
    "step reward informative truncated length entropy (kept) grad_norm      lr tokens/s seconds"
)
LINE = (
    "{step:4d} {reward:6.3f} {informative:11.0%} {truncated:9.0%} {length:6.1f} {entropy:7.3f}"
    " {entropy_kept:6.3f} {grad_norm:9.3f} {lr:7.1e} {tokens_per_s:8.0f} {seconds:7.2f}"
)


def log_row(run):
    """Writes metrics.csv, and prints its last row: every --log-every steps, or if evaluated."""
    row = run.rows[-1]
    path = Path(run.config.out, "metrics.csv")
    with explain(str(path)), open(path, "w", newline="") as file:
        log = csv.DictWriter(file, dict.fromkeys(name for row in run.rows for name in row))
        log.writeheader()
        log.writerows(run.rows)
    if row["step"] % run.config.log_every and "accuracy" not in row:
        return
    if run.printed % 20 == 0:
        print(HEADER, "   GB accuracy")
    run.printed += 1
    line = "   0" if row["step"] == 0 else LINE.format(**row)
    memory = f"{row['peak_gb']:5.2f}" if row.get("peak_gb") else ""
    accuracy = f"{row['accuracy']:.3f}" if "accuracy" in row else ""
    print(f"{line:{len(HEADER)}} {memory:5} {accuracy:>8}".rstrip(), flush=True)
    if row.get("informative") == 0:
        print("  equal rewards in every group: nothing to learn from")
    if run.config.show and run.shown and accuracy:
        show(run)


def show(run):
    """Prints an answer better and one worse than its group's mean: kept tokens, largest scores."""
    batch, keep, scores = run.shown
    plain = not sys.stdout.isatty() or os.getenv("NO_COLOR")
    start, end = "[]" if plain else ("\033[7m", "\033[0m")
    for name, sign in (("right", 1), ("wrong", -1)):
        side = batch.advantages[:, 0] * sign > 0  # (N,)
        row = int((side * (1 + keep.sum(dim=1))).argmax())  # the one with the most kept tokens
        # Token by token and escaped: what a model wrote must not steer a terminal.
        ids = batch.tokens[row, batch.mask[row] & side[row]].tolist()
        words = [repr(run.tokenizer.decode([i]))[1:-1] for i in ids]
        marked = [start + words[t] + end if keep[row, t] else words[t] for t in range(len(words))]
        places = scores[row, : len(ids)].argsort(descending=True)[:5].tolist()
        best = ", ".join(f"{words[t]!r} {scores[row, t]:.3f}" for t in places)
        print(
            f"  {name}: {''.join(marked) or 'none'}\n    largest {run.config.select} scores: {best}"
        )


# ---- 7 The demo: a careless pupil learns to add --------------------------------------------------


def demo_problems(count=20_000):
    """Questions such as 348+214= with their sums."""
    rng = random.Random(0)
    pairs = [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(count)]
    return [(f"{a}+{b}=", str(a + b)) for a, b in dict.fromkeys(pairs)]


FORGETS, SLIPS = 0.7, 0.03  # how often the pupil forgets a carry, or is one off in a column


def careless_pupil(question, rng):
    """Adds column by column from the right: 348+214= -> 8+4+0=12 4+1+1=06 3+2+0=05 ####562."""
    columns, digits, carry = [], "", 0
    a, b = question.rstrip("=").split("+")
    for x, y in zip(reversed(a), reversed(b), strict=True):
        carry = 0 if rng.random() < FORGETS else carry
        slip = rng.choice((-1, 1)) if rng.random() < SLIPS else 0
        total = f"{max(0, int(x) + int(y) + carry + slip):02d}"
        columns.append(f"{x}+{y}+{carry}={total}")
        carry, digits = int(total[0]), total[1] + digits
    return " ".join(columns) + f" ####{carry or ''}{digits}"


def demo_tokenizer():
    """A token for each character, and one for ####."""
    symbols = ["<end>", "<unknown>", "####", *"0123456789+= "]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("####|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    )


def demo_model(problems, steps=600):
    """A Qwen2 of 242k parameters that has watched a careless pupil add -> model, tokenizer."""
    tokenizer = demo_tokenizer()
    settings = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(settings)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for step in tqdm(range(steps), "warm start", leave=False, disable=None):
        questions = [random.choice(problems)[0] for _ in range(64)]
        texts = [question + careless_pupil(question, random) + "<end>" for question in questions]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)  # (64, L+T)
        labels[:, : len(questions[0])] = -100
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 - 0.95 * step / steps)
        model(input_ids=batch.input_ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


# ---- 8 The verifier ------------------------------------------------------------------------------
# Is the answer of a language model the reference answer? Nothing is guessed or executed.
#
# `extract_answer` finds an answer in a completion, `answers_match` compares two, `is_correct` does
# both. Symbols get one spelling each. A parser reads them; its functions return values, there is no
# tree. An expression is its value at four points, its letters positive, negative and twice complex,
# and exact while it is rational. What cannot be read matches its own text only.
# What is read, and where:
#
#     1,234   1{,}234   .5   0.\overline{3}   3 \times 10^8   1101_2       TOKEN, product, primary
#     x   x_{12}   f'   \alpha   \pi   e   i   \infty   \vec{a}           letter
#     \frac{a}{b}   \frac12   \frac\pi3   2\frac34   \binom nk   |x|      COMMANDS, primary
#     x^{-1}   5!   \sqrt2   \sqrt[3]{x}   {a \over b}                    power, COMMANDS, sum
#     \sin 2x   \sin^2 x   \tan^{-1} x   \log_2 8   \ln(x)                FUNCTIONS, function
#     12\text{ cm}^2   5 apples   \$4.50   28\%   60^\circ   3:2          term
#     x = 5   f(x) = 2x   x + y = 3   e^{i\pi} = -1   \sqrt2 \approx 1.4  relate
#     x \ge 5   0 < x \le 1   x \in [0, 1)   \{x : x > 0\}   x \ne 2      relate
#     1, 2   1 and 2   \{1, 2\}   A \cup B   (1, 2)   matrices            entries, bracket
#     1 \pm 2   \text{East}   No solution   (B) 19   B.                   read_math, letter, CHOICE

import cmath  # noqa: E402
import functools  # noqa: E402
import operator  # noqa: E402
import unicodedata  # noqa: E402
from collections import deque  # noqa: E402
from dataclasses import replace  # noqa: E402
from fractions import Fraction  # noqa: E402

MAX_ANSWER_LENGTH = 2_000  # characters of an answer
MAX_ANSWER_TOKENS = 300  # symbols of an answer
MAX_DEPTH = 50  # brackets in brackets
MAX_BITS = 2_500  # of a numerator or denominator
NOISE = 1e-13  # a sum this small beside its terms is rounding
TOLERANCE = 1e-10  # relative, where a value is not exact
DECIMAL_TOLERANCE = 1e-6  # relative, where a decimal stands for 1/3 or \sqrt2

# -- Spelling: symbols one by one, functions, words, phrases

# What has no meaning; and symbols, also of units: the spelling used here, a colon, others for the
# same. Two blanks or more end an entry.
LAYOUT = r"""$ ~ \( \) \[ \] \left \right \big \Big \bigg \Bigg \bigl \bigr \Bigl \Bigr \quad \qquad
    \displaystyle \textstyle \large \Large \normalsize \small \rm \bf \, \; \: \! \limits \therefore
    \boxed \mathrm \mathbf \mathbb \text \textbf"""
SYMBOLS = r"""
    -: − – —        *: \cdot \times \ast · × ⋅        ÷: \div        /: ⁄        ^: **
    ±: \pm          ∓: \mp              =: \approx ≈ \simeq        ≠: \ne \neq !=        ∈: \in
    <: \lt          >: \gt              ≤: <= \le \leq \leqslant   ≥: >= \ge \geq \geqslant
    (: \langle      ): \rangle          \{: \lbrace   \}: \rbrace   ,: ; or \cup ∪ \bigcup \lor
    ∧: & and        %: \% percent percentage pct         °: degree degrees \degree º
    "dollar": \$    "euro": €           "pound": £
    \frac: \dfrac \tfrac \cfrac         \binom: \dbinom \tbinom  \sqrt: √ sqrt    \abs: abs
    \floor {: \lfloor                   \ceil {: \lceil          }: \rfloor \rceil
    \pi: pi         \infty: ∞ infinity inf       \emptyset: ∅ \varnothing   ': ′ \prime
    log: lg \lg
"""
UNIT_SYMBOLS = """
    mm: millimeter  cm: centimeter   m: meter     km: kilometer    in: inch inche    ft: foot feet
    yd: yard        mi: mile         g: gram      kg: kilogram     lb: pound         oz: ounce
    s: sec second   min: minute      h: hr hour   L: liter         /: per            ^2: square sq
    ^3: cubic
"""


def spellings(table):
    """A table as above -> {another spelling: the one used here}."""
    entries = [entry.split(": ") for entry in re.split(r"\s{2,}", table.strip())]
    return {other: symbol for symbol, others in entries for other in others.split()}


SPELLING = spellings(SYMBOLS) | dict.fromkeys(LAYOUT.split(), "")
UNIT_SPELLING = spellings(UNIT_SYMBOLS)

FUNCTIONS = {name: getattr(cmath, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")}
FUNCTIONS |= {"arc" + name: getattr(cmath, "a" + name) for name in FUNCTIONS}  # asin, acos, ...
FUNCTIONS |= {
    "sec": lambda z: 1 / cmath.cos(z),
    "csc": lambda z: 1 / cmath.sin(z),
    "cot": lambda z: 1 / cmath.tan(z),
    "arcsec": lambda z: cmath.acos(1 / z),
    "arccsc": lambda z: cmath.asin(1 / z),
    "arccot": lambda z: cmath.atan(1 / z),
    "ln": cmath.log,
    "log": cmath.log10,
    "exp": lambda z: raise_to(math.e, z),
}
COMMANDS = {  # how many arguments, and the operation
    r"\frac": (2, operator.truediv),
    r"\mixed": (3, lambda whole, a, b: mixed_number(whole, a, b)),
    r"\sqrt": (1, lambda z: raise_to(z, Fraction(1, 2))),
    r"\root": (2, lambda degree, z: raise_to(z, 1 / degree)),
    r"\binom": (2, lambda n, k: factorial(n) / (factorial(k) * factorial(n - k))),
    r"\abs": (1, abs),
    r"\floor": (1, lambda z: cmath.atan(inexact(z) + 0.3)),  # not evaluated: each is the same as
    r"\ceil": (1, lambda z: cmath.atan(inexact(z) + 0.7)),  # itself, which a strange function is
}
UNITS = """cm mm km nm kg mg ml ft in yd mi lb lbs oz hr hrs sec ms mph m g s h L N J V W A K C Pa
    Hz kW kJ eV am pm sq of a an it is no""".split()  # and short words beside them: 3/4 of a cup
CHANGES_VALUE = re.compile(  # five hundred, two thirds, 5 squared, not 7
    r"(one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty"
    r"|fifty|sixty|seventy|eighty|ninety|hundred|thousand|\w+illion|lakh|crore|dozen|score|half"
    r"|halve|quarter|third|(four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred"
    r"|thousand|\w+illion)th)s?|squared|cubed|choose|times|over|divided|by|plus|minus|point|less"
    r"|more|not|wrong|incorrect|false|factorial|halved|double|doubled|triple|tripled|twice|negative"
    r"|inverse|reciprocal|root|raised|below"
)


def quote_words(phrase):
    """Puts words, perhaps units, in quotes, but not functions and what changes a value.

    Letters without a vowel are a product, such as xyz.
    """

    def quote(letters):
        word = letters[0] if letters[0] in UNITS else letters[0].lower()
        known = word in SPELLING or word.lstrip("\\") in FUNCTIONS or CHANGES_VALUE.fullmatch(word)
        is_word = len(word) > 2 and re.search("[aeiou]", word) and not known
        return f'"{word}"' if is_word or word in UNITS else letters[0]

    words = re.sub(r"(?<=[A-Za-z])\.", "", phrase[1])  # sq. in., p.m.
    return " " + re.sub(r"\\?[A-Za-z]+", quote, words) + " "


def plain(symbol):
    """² -> 2, ¾ -> 3/4."""
    return unicodedata.normalize("NFKC", symbol[0]).replace("⁄", "/")


def greek_letter(symbol):
    """α -> \\alpha, Δ -> \\Delta."""
    _, size, _, name = unicodedata.name(symbol[0]).split()[:4]
    name = name.lower().replace("lamda", "lambda")
    return " \\" + (name if size == "SMALL" else name.title()) + " "


TEXT_COMMAND = r"\\(?:text\w*|math(?:rm|bf|it|sf|tt|cal)|[mh]box|operatorname|boldsymbol)\*?\s*"
MATRIX = r"\s*\{(?:[pbB]|small)?(?:matrix|array)\}"
FRACTION = r"\\(?:[dtc]?frac|[dt]?binom)"
PHRASES = [  # from one spelling to another, in this order; \mixed, \root, @, ⟦ ⟧ are our own
    (r"\s+", " "),
    (r"\\(?:mixed|root)\b|[@∧⟦⟧]", " ? "),  # and unreadable in an answer
    (r"[Α-ΡΣ-Ωα-ω]", greek_letter),
    (r"[¼-¾⅐-⅞]", lambda fraction: " " + plain(fraction) + " "),
    (r"([⁰¹²³⁴-⁹]|⁻(?=[¹²³⁴-⁹]))+", lambda power: "^{" + plain(power) + "}"),
    (r"[₀-₉]+", lambda index: "_{" + plain(index) + "}"),
    (r"\\(?:text)?color\s*\{\w+\}|\\underline\b", ""),
    # Backslashes that were doubled on the way here, dollar signs, a backslash and a blank.
    (r"(?<!\\)\\\\(?=(?:d?frac|left|right|sqrt|text|pi|begin|end|cdot|times|infty)\b)", r"\\"),
    (r"(?<!\\)\$|(?<!\\)\\(?:\s|$)", " "),
    # A matrix is a bracket with rows in brackets.
    (rf"\\begin{MATRIX}(\s*\{{[lcr|\s]*\}})?", "⟦⟦"),
    (rf"(?:\\\\\s*)?\\end{MATRIX}", "⟧⟧"),
    (r"\\\\(?:\s*\[[\d.]+\s*[a-z]{2}\])?", "⟧,⟦"),
    # Words go in quotes: in \text{}, behind a number, units close to it, alone, of four letters.
    (r'"', "″"),
    (r"(?:\\in\b|∈)\s*(?:\\mathbb\s*\{?R\}?|ℝ)\s*(?=:|\||\\mid\b)", ""),
    (r"\\mathbb\s*\{?R\}?|ℝ", r"(-\\infty,\\infty)"),
    (TEXT_COMMAND + r"\{([^{}]*)\}", quote_words),
    (r"(?<=[\d})])(\s+[A-Za-z]{3,}(?:[\s/]+[A-Za-z]+)*)", quote_words),
    (r"(?<=[\d})])(\s*(?:[ckm]m|[km]g|ft|in|mi|lb|hr|mph)\b(?:[\s/]+[A-Za-z]+)*)", quote_words),
    (r"(?<=:\d\d)(\s*(?:[ap]m|[ap]\.m\.|[AP]M|[AP]\.M\.))", quote_words),
    (r"^([A-Za-z][A-Za-z\s'-]+)$", quote_words),
    (r"(?<![\\A-Za-z\"])([A-Za-z]{4,})", quote_words),
    (r'"\s*\^\s*\{?(-?[1-4])\}?', r'^\1"'),  # cm^2
    # Numerals: digits of any script, 1{,}234, 3{:}30, \frac13 \approx 0.33, 2\frac34, 60^\circ.
    (r"\d", lambda digit: str(int(digit[0]))),
    (r"(?<=\d)(?:\s*(?:\\text)?\{\s*,\s*\}|,?\\!|,?\\[,; ])\s*(?=\d{3})", ""),
    (r"\{:\}", ":"),
    (r"(?:(?<=[\d})])|(?<=\\pi)) ?(?:\\approx|≈)[ -]*[\d.]+(?![\d^!*/])", ""),
    (
        r"(?<![\d.^_])(\d+)(?:\s|\\[,; ])*\\[dtc]?frac\s*(\d|\{\d+\})\s*(\d|\{\d+\})",
        r"\\mixed{\1}{\2}{\3}",
    ),
    (r"(?<![\d.^_])(\d+)\s+(\d+)/(\d+)", r"\\mixed{\1}{\2}{\3}"),
    (r"\^\s*\{?\s*\\circ\s*\}?", "°"),
    # Arguments and brackets: \{x : x > 0\}, \{\}, |x|, √16, \sqrt[3]{x}, \frac12.
    (r"\\\{\s*[A-Za-z]\s*(?::|\||\\mid\b)", r"\\{"),
    (r"\\\{\s*\\\}", r"\\emptyset "),
    (r"(?:\||\\[lr]?vert\b)([^|]+?)(?:\||\\[lr]?vert\b)", r"\\abs{\1}"),
    (r"√\s*(\d+)", r"\\sqrt{\1}"),
    (r"(?:\\sqrt|√)\s*\[([^\[\]]*)\]", r"\\root{\1}"),
    (r"log\s*_", "log @"),
    (r"\\(vec|hat|bar) ?([A-Za-z])", r"\\\1{\2}"),
    (rf"({FRACTION}|\\sqrt|log @)\s*(\d)", r"\1{\2}"),
    (rf"({FRACTION}\s*\{{[^{{}}]*\}})\s*(\d)", r"\1{\2}"),
    # Indices: f(x) is no product, x_1 is x_{1}, and (1101)_2 is 1101_2.
    (r"(?<![\\A-Za-z])([fg])(?:\\left)?\(([^(){}]*?)(?:\\right)?\)", r"\1_{(\2)}"),
    (r"_\s*(\d+|[A-Za-z]|\\[A-Za-z]+)", r"_{\1}"),
    (r"\((\d+)\)_", r"\1_"),
    (r"_\s*\{[^{}]*\}", lambda index: "".join(index[0].split())),
]
TOKEN = re.compile(
    r"""(?:\d*\.\d*)?\\(?:vec|hat|bar|dot|over\w+)\{[^{}]*\}        # \vec{a}, 0.\overline{3}
    | \\[A-Za-z]+ | \\. | _\{[^{}]*\}                               # commands, indices
    | "[^"\s]+" | [A-Za-z]+                                         # words, runs of letters
    | (?<!\d,)\d{1,3}(?:[, ]\d{3})+(?![, ]?\d)(?:\.\d+)?            # 1,234,567.8
    | \d+_\{\d+\} | \d+\.?\d* | \.\d+                               # 1101_2, 1.5, .5
    | <= | >= | (?<=\s)!= | \*\* | \S""",
    re.VERBOSE | re.DOTALL,
)
END_OF_TEXT = "end of text"  # no letters only: it must not look like a factor


def tokenize_math(text):
    """One spelling for each symbol: numbers, letters, functions, commands, words in quotes."""
    for pattern, spelling in PHRASES:
        text = re.sub(pattern, spelling, text)
    tokens, depth = [], 0
    for token in TOKEN.findall(text):
        symbol = SPELLING.get(token, token)
        depth += (symbol in ("(", "[", r"\{")) - (symbol in (")", "]", r"\}"))
        if token[0].isdecimal():  # in brackets 1,234 are two numbers
            tokens += token.replace(" ", "").replace(",", " , " if depth > 0 else "").split()
        elif symbol.removeprefix("\\") in FUNCTIONS:
            tokens.append(symbol.removeprefix("\\"))
        else:
            tokens += symbol if symbol.isalpha() else symbol.split()  # letter by letter
    return tokens


# -- Values


@dataclass(frozen=True)
class MathValue:
    points: tuple = ()  # of a number: a Fraction or complex; four of them if there are letters
    kind: str = "number"  # or "list" (no order: a set, a union), "()", "[)", "⟦⟧" for a matrix, "="
    items: tuple = ()  # of a list, a tuple, an interval, a matrix
    computed: bool = False  # has a sum or product of numerals: 3*4+2, the question and no answer
    decimal: bool = False  # has a decimal point
    unit: str = ""
    name: str = ""  # the x of x = 5 and of 0 < x < 1
    sides: tuple = ()  # of an equation or an inequality: its sign, left and right


def is_exact(value):
    return len(value.points) == 1 and isinstance(value.points[0], Fraction)


def is_whole(value):
    return is_exact(value) and value.points[0].denominator == 1


def require(condition, reason):
    """Whatever does not hold makes a text unreadable."""
    if not condition:
        raise ValueError(reason)


def inexact(number, noise=0):
    """A complex double whose parts are 0 or of moderate size; all else raises."""
    result = complex(number) + 0j  # turns -0.0, the other side of a branch cut, into 0.0
    require(result or not number, "underflow is not 0")
    parts = [0.0 if abs(part) <= noise else part for part in (result.real, result.imag)]
    for part in parts:
        require(part == 0 or 1e-150 < abs(part) < 1e150, "too large, too small or not a number")
    return complex(*parts)


def combine(operation, *operands, computed=False, noisy=False):
    """The value of an operation. All numbers are made here, and none of them can grow."""
    require(all(x.kind == "number" and not x.unit for x in operands), "a number is needed")
    if operation is operator.truediv and not is_whole(operands[1]):
        computed = True  # 3/(1/4) is the product of 3 and 4
    points = []
    for place in range(max(len(x.points) for x in operands)):
        numbers = [x.points[place % len(x.points)] for x in operands]
        if not all(isinstance(x, Fraction) for x in numbers):
            numbers = [inexact(x) if isinstance(x, Fraction) else x for x in numbers]
        result = operation(*numbers)
        if isinstance(result, Fraction):
            bits = max(result.numerator.bit_length(), result.denominator.bit_length())
            require(bits <= MAX_BITS, "too many digits")
        else:
            result = inexact(result, NOISE * max(abs(x) for x in numbers) if noisy else 0)
        points.append(result)
    computed = computed and len(points) == 1 or any(x.computed for x in operands)
    return MathValue(tuple(points), computed=computed, decimal=any(x.decimal for x in operands))


def raise_to(base, exponent):
    """A power, exact if it can be; an odd root of a negative number is the real one."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        power, degree = exponent.numerator, exponent.denominator
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1  # 0 for 1, -1
        if degree == 1 and bits * abs(power) <= MAX_BITS:
            return base**power
        if base < 0 and degree % 2:
            return (-1) ** power * raise_to(-base, exponent)
    base, exponent = inexact(base), inexact(exponent)
    result = base**exponent
    require(result or not base, "underflow is not 0")
    return result


def mixed_number(whole, numerator, denominator):
    require(0 < numerator < denominator, "a mixed number has a proper fraction")
    return whole + numerator / denominator


def recurring_decimal(whole, head, period):
    r"""0.1\overline{6} is (16 - 1) / 90."""
    difference = int(whole + head + period) - int(whole + head or "0")
    return Fraction(difference, (10 ** len(period) - 1) * 10 ** len(head))


def factorial(z):
    """Exact for whole numbers, else by Stirling's series, from where it has 12 digits."""
    if isinstance(z, Fraction) and z.denominator == 1 and 0 <= z <= 500:
        return Fraction(math.factorial(int(z)))
    z, product = inexact(z) + 1, 1
    require(abs(z) < 200, "a large factorial")
    while z.real < 25:
        z, product = z + 1, product * z
    series = 1 / (12 * z) - 1 / (360 * z**3) + 1 / (1260 * z**5)
    return cmath.exp((z - 0.5) * cmath.log(z) - z + series) * math.sqrt(2 * math.pi) / product


CONSTANTS = {"e": complex(math.e), "i": 1j, r"\pi": complex(math.pi)}
GREEK = """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau
    upsilon phi chi psi omega varepsilon vartheta varphi varrho varsigma varpi"""
LETTERS = {"\\" + name for name in f"{GREEK} {GREEK.title()} ell hbar infty emptyset".split()}


@functools.lru_cache(1000)
def letter_value(name):
    """Four numbers, wherever the name stands the same, as it is the seed; one for e, i and pi."""
    if name in CONSTANTS:
        return MathValue((CONSTANTS[name],))
    a, b, c, d = (Fraction(x, 997) for x in random.Random(name).sample(range(1000, 4000), 4))
    return MathValue((a, -b, complex(c, d), complex(-d, a)))


DEGREE = MathValue((complex(math.pi / 180),))
HUNDRED = MathValue((Fraction(100),))
INFINITY = letter_value(r"\infty")
MINUS_INFINITY = combine(operator.neg, INFINITY)

# -- The parser

RELATIONS = ("=", "≠", "<", "≤", ">", "≥", "∈")
BRACKETS = {"(": (")", "]"), "[": (")", "]"), "{": ("}",), r"\{": (r"\}",), "⟦": ("⟧",)}
CLOSING = (")", "]", "}", r"\}", "⟧")
ARGUMENT_ENDS = (*FUNCTIONS, *COMMANDS, *BRACKETS)  # \sin 2x \cos x: up to \cos
INFIX = {r"\over": r"\frac", r"\choose": r"\binom"}
INTERVALS = {"<<": "()", "<≤": "(]", "≤<": "[)", "≤≤": "[]"}
INDEX = r"(?:_\{[^{}]*\})?"
NAME = re.compile(  # what an equation may be solved for
    rf"""[A-Za-z]{INDEX}'*(?:\^\{{-1\}})?(?:\([\w,]+\))?      # x, a_{{10}}, f(x), f^{{-1}}(x)
    | \\[a-z]+{INDEX} | \([a-z]{INDEX}(?:,[a-z]{INDEX})*\)    # \theta, (x,y)
    | \\over\w+\{{[A-Z]+\}}                                  # \overline{{AB}}
    | (?=.*[A-Z])(?:\\frac|\\abs|[A-Z{{}}/:_\d])+             # AB, |AB|, AB/CD
    | (?:sin|cos|tan)\\?[A-Za-z]+ | m?\\angle\ ?\w+        # \sin \theta, \angle ABC
    | ".* | \\frac\{{d\w*\}}\{{d\w\}} | \\(?:lim|max|min|sum|prod|int).* """,
    re.VERBOSE,
)


@dataclass
class MathParser:
    """Each method reads one construct, from the position on, and returns its value."""

    tokens: list
    plus_minus: int = 1  # which sign a plus-minus has in this reading
    position: int = 0
    depth: int = 0

    def peek(self, offset=0):
        return self.tokens[self.position + offset]

    def advance(self):
        self.position += 1
        return self.tokens[self.position - 1]

    def take(self, *wanted):
        """The next token if it is one of these, else an empty text."""
        return self.advance() if self.peek() in wanted else ""

    def entries(self, *closing):
        """Items between commas, up to the closing bracket."""
        items = [self.relation()]
        while not self.take(*closing):
            separator = self.take(",", "∧")
            require(separator, "a comma or a bracket is missing")
            self.take(",", "∧")  # 1, 2, and 3
            item = self.relation()
            if separator == "∧" and item.sides and items[-1].kind in INTERVALS.values():
                item = intersect(items.pop(), item)
            items.append(item)
        return tuple(items)

    def relation(self):
        """Terms with =, <, ... between them, or one term."""
        self.take("=")  # or ≈
        terms, names, signs = [], [], []
        while True:
            start = self.position
            terms.append(self.term())
            names.append("".join(self.tokens[start : self.position]))
            sign = self.take(*RELATIONS)
            if not sign:
                return relate(terms, names, signs) if signs else terms[0]
            signs.append(sign)

    def term(self):
        """A sum or a ratio, with its unit: 12 cm, \\$5, 60°, 5 miles per hour."""
        unit = self.take('"dollar"', '"euro"', '"pound"')
        left = value = self.sum()
        ratio = self.take(":")
        value = self.sum() if ratio else left
        sign = self.take("%", "°")
        sign += sign == "°" and self.take('"C"', '"F"', "C", "F").strip('"') or ""
        while not sign and (self.peek()[0] == '"' or unit and self.peek() == "/"):
            unit += self.advance()
        unit = sign or unit_spelling(unit)
        value = replace(value, unit=unit) if unit and value.kind == "number" else value
        return MathValue(kind=":", items=(left, value)) if ratio else value

    def sum(self):
        """Products with their signs, which signed() reads; then {a \\over b}."""
        value = self.product()
        while self.peek() in ("+", "-", "±", "∓"):
            value = combine(operator.add, value, self.product(), computed=True, noisy=True)
        while command := INFIX.get(self.take(*INFIX)):
            value = combine(COMMANDS[command][1], value, self.sum())
        return value

    def product(self):
        """Factors, with or without a sign between them."""
        value = self.signed()
        while True:
            numeral = self.peek(-1)[0].isdigit() and self.peek(-2) != "^"
            sign = self.take("*", "/", "÷")
            if not sign and not self.at_factor():
                return value
            ahead = "".join(self.tokens[self.position :][:6])
            scientific = numeral and re.match(r"10\^(\{[-+]?\d+\}|-?\d+)", ahead)  # 3*10^8
            factor = self.signed() if sign else self.power()
            if sign in ("/", "÷"):
                value = combine(operator.truediv, value, factor, computed=sign == "÷")
            else:
                value = combine(operator.mul, value, factor, computed=not scientific)

    def at_factor(self):
        """Does a factor follow? A numeral behind a numeral or a letter is none."""
        token = self.peek()
        if token[0].isdigit():
            return self.peek(-1) in ("!", ")", "}")
        command = token[0] == "\\" and token not in (r"\}", *INFIX)
        return command or token in ("(", "[", "{") or token.isalpha()

    def signed(self):
        """A power and the signs before it."""
        sign = {"": 1, "±": self.plus_minus, "∓": -self.plus_minus}[self.take("±", "∓")]
        while token := self.take("+", "-"):
            sign = -sign if token == "-" else sign
        value = self.power()
        return value if sign > 0 else combine(operator.neg, value)

    def power(self):
        """An operand and what stands behind it: x^2, n!."""
        value = self.primary()
        while self.take("!"):
            value = combine(factorial, value)
        return combine(raise_to, value, self.exponent()) if self.take("^") else value

    def exponent(self):
        negative = self.take("-")
        value = self.primary()
        return combine(operator.neg, value) if negative else value

    def primary(self):
        """An operand: a number, a letter, something in brackets, a command with its arguments."""
        self.depth += 1
        require(self.depth <= MAX_DEPTH, "too deep")
        token = self.advance()
        if token in COMMANDS:
            count, operation = COMMANDS[token]
            value = combine(operation, *[self.primary() for _ in range(count)])
        elif token in FUNCTIONS:
            value = self.function(token)
        elif token in BRACKETS:
            value = self.bracket(token)
        elif re.fullmatch(r"\d+\.?\d*|\.\d+", token):
            value = combine(operator.pos, MathValue((Fraction(token),), decimal="." in token))
        elif recurring := re.fullmatch(r"(\d*)\.(\d*)\\\w+\{(\d+)\}", token):
            value = combine(operator.pos, MathValue((recurring_decimal(*recurring.groups()),)))
        else:
            value = self.letter(token)
        self.depth -= 1
        return value

    def letter(self, name):
        """A letter, a word, a numeral in a base or an unknown command, with primes and index."""
        require(re.fullmatch(r'".+"|\\?[A-Za-z]+|\S+\{.*\}', name), "an unknown symbol")
        if name[0] == "\\" and name[1:].isalpha() and name not in LETTERS:
            return letter_value(name + self.text_to_the_end())
        while name[0] == '"' and self.peek()[0] == '"':
            name += self.advance()  # area of the square
        while self.peek()[0] in "'_":
            name += self.advance()
        return letter_value(name.strip('"'))

    def text_to_the_end(self):
        r"""What an unknown command acts on, as it stands: p \to q is not q \to p."""
        start, depth = self.position, 0
        while self.peek() != END_OF_TEXT:
            closes = self.peek() in CLOSING
            if depth == 0 and (closes or self.peek() in (",", *RELATIONS)):
                break
            depth += (self.peek() in BRACKETS) - closes
            self.advance()
        return " ".join(["", *self.tokens[start : self.position]])

    def function(self, name):
        r"""Its base or power, then what stands in brackets, or factors up to the next function."""
        base = self.primary() if self.take("@") else None
        power = self.exponent() if self.take("^") else None
        if power and power.points == (-1,):  # \tan^{-1}
            require("arc" + name in FUNCTIONS, "an inverse that is not known")
            name, power = "arc" + name, None
        in_brackets = self.peek() in ("(", "[", "{")
        argument = self.primary() if in_brackets else self.signed()
        while not in_brackets and self.at_factor() and self.peek() not in ARGUMENT_ENDS:
            argument = combine(operator.mul, argument, self.power(), computed=True)
        if self.take("°") or argument.unit == "°":
            argument = combine(operator.mul, replace(argument, unit=""), DEGREE)
        small = all(abs(inexact(z)) < 1e6 for z in argument.points)
        noisy = small and name in ("sin", "cos", "tan", "cot")  # sin(pi) is 1.2e-16 in doubles
        value = combine(lambda z: FUNCTIONS[name](inexact(z)), argument, noisy=noisy)
        if base:
            value = combine(lambda z, b: z / FUNCTIONS[name](inexact(b)), value, base)
        return combine(raise_to, value, power) if power else value

    def bracket(self, opening):
        """A set, a tuple, an interval, a matrix, a row; around one item brackets only group."""
        items = self.entries(*BRACKETS[opening])
        kind = opening + self.peek(-1)
        if len(items) == 1 and kind in ("()", "[]", "{}"):
            return items[0]
        return MathValue(kind="list" if opening in ("{", r"\{") else kind, items=items)


def unit_spelling(unit):
    """The words of a unit, each in quotes, in one spelling: "square""centimeters" -> cm^2."""
    words = re.findall(r'/|[^"^/]+|\^-?\d', re.sub(r'(?<=\w\w)s(?="|\^)', "", unit))
    words = [UNIT_SPELLING.get(word, word) for word in words]
    return re.sub(r"(\^[23])(\w+)", r"\2\1", "".join(words))


def intersect(a, b):
    """x > 1 and x < 5 are one interval."""
    low, high = (a, b) if a.items[1] == INFINITY else (b, a)
    require(a.name == b.name, "two names")
    require((high.items[0], low.items[1]) == (MINUS_INFINITY, INFINITY), "two ends of a side")
    bottom, top = low.items[0], high.items[1]
    require(not is_exact(bottom) or not is_exact(top) or bottom.points < top.points, "empty")
    return MathValue((), low.kind[0] + high.kind[1], (bottom, top), name=a.name)


def relate(terms, names, signs):
    """Terms with relations: what a name is equal to, the interval of a name, or two sides."""
    if signs == ["∈"]:
        a_number = terms[1].kind == "number" and len(terms[1].points) == 1
        require(NAME.fullmatch(names[0]) and not a_number, "a name in a set is needed")
        return terms[1]
    if signs[0] in (">", "≥"):
        terms, names = terms[::-1], names[::-1]
        signs = [{">": "<", "≥": "≤"}.get(sign) for sign in signs[::-1]]
    sides = (signs[0], terms[0], terms[-1])
    if set(signs) == {"="}:
        if terms[0].points and points_match(terms[0], terms[-1]):
            return terms[-1]  # 10/2 = 5
        steps = [term for term in terms[1:-1] if len(term.points) != 1]
        require(all(points_match(term, terms[-1]) for term in steps), "x = 13 x = 12")
        if NAME.fullmatch(names[0]):
            return replace(terms[-1], name=names[0], sides=sides)
        if NAME.fullmatch(names[-1]):
            return replace(terms[0], name=names[-1], sides=sides)
    elif set(signs) <= {"<", "≤"}:
        sides = sides if len(terms) == 2 else ()
        if len(terms) == 2 and NAME.fullmatch(names[0]):  # x < 5 is -oo < x < 5
            terms, names = [MINUS_INFINITY, *terms], ["", *names]
            signs = ["<", *signs]
        elif len(terms) == 2 and NAME.fullmatch(names[1]):  # 5 < x is 5 < x < oo
            terms, signs = [*terms, INFINITY], [*signs, "<"]
        if len(terms) == 3 and NAME.fullmatch(names[1]):
            ends = (terms[0], terms[2])
            return MathValue((), INTERVALS["".join(signs)], ends, name=names[1], sides=sides)
    require(len(terms) == 2, "relations that do not go together")
    return MathValue(kind=sides[0], sides=sides)


# -- The comparison


def points_match(a, g, tolerance=TOLERANCE):
    """The same values at all points: rational ones exactly, unless a decimal is rounded.

    What has letters is no number: x - x is not 0, since a stray letter must not hide a sum.
    """

    def match(x, y):
        if tolerance < DECIMAL_TOLERANCE and isinstance(x, Fraction) and isinstance(y, Fraction):
            return x == y
        x, y = inexact(x), inexact(y)
        return abs(x - y) <= tolerance * max(abs(x), abs(y))

    return len(a.points) == len(g.points) and all(map(match, a.points, g.points))


def numbers_match(a, g):
    """An answer and a gold with their units: 12 cm is 12, but not 12 m; p% is p, and p/100."""
    if a.unit and g.unit and a.unit != g.unit:
        return False
    # A root or a multiple of pi for its rounded decimal: 2\sqrt3 for 3.4641016, not 12.5\cos 0 + 2.
    rounded = g.decimal and is_exact(g) and not is_whole(g) and not is_exact(a)
    rounded = rounded and (g.points[0].denominator > 10**12 or not points_match(a, g, 1e-13))
    if a.computed and is_exact(g) and not g.computed and not rounded:
        return False  # else boxing the question would pay
    tolerance = TOLERANCE
    if a.decimal != g.decimal and len(a.points) == 1 and not is_whole(a) and not is_whole(g):
        tolerance = DECIMAL_TOLERANCE
    elif is_whole(g) and not is_exact(a):  # a double does not tell large integers apart
        size = max(1, abs(g.points[0]))
        require(size < 2**53, "too large for a double")
        tolerance = min(TOLERANCE, 0.01 / size)
    if points_match(a, g, tolerance):
        return True
    if a.unit == g.unit or "%" not in (a.unit, g.unit):
        return False
    percent, other = (a, g) if a.unit == "%" else (g, a)
    return points_match(percent, combine(operator.mul, other, HUNDRED), tolerance)


def quotient(ratio):
    return combine(operator.truediv, *ratio.items, computed=True)


def is_clock(value):
    """Is it, perhaps, a time of day? 1:10 is not 3:30."""
    return value.kind == ":" and is_exact(value.items[1]) and value.items[1].points[0] >= 10


def items_match(a, g):
    """Two items of any kind; x = 5 is 5, but not y = 5."""
    if a.sides and g.sides and not (a.name and a.name == g.name):
        solved = g.sides[0] == "=" and g.name and any(len(x.points) == 1 for x in g.sides[1:])
        return not solved and sides_match(a.sides, g.sides)  # 2x = 28 for x = 14: the question
    if a.name and g.name and a.name != g.name:
        return False
    if "list" in (a.kind, g.kind):
        return lists_match(*(x.items if x.kind == "list" else (x,) for x in (a, g)))
    if ":" in (a.kind, g.kind) and not (is_clock(a) and is_clock(g)):  # 3:2 is 6:4 and 3/2
        a, g = (quotient(x) if x.kind == ":" else x for x in (a, g))
    if a.kind != g.kind:
        return False
    if a.kind == "number":
        return numbers_match(a, g)
    return len(a.items) == len(g.items) > 0 and all(map(items_match, a.items, g.items))


def sides_match(a, g):
    """Equations with proportional differences; of inequalities the factor is positive."""
    scaled = []
    for sign, left, right in (a, g):
        if sign != a[0] or not left.points or not right.points or left.unit or right.unit:
            return False
        difference = combine(operator.sub, left, right, noisy=True)
        scale = difference.points[0] if sign in "=≠" else abs(difference.points[0])
        scaled.append(combine(operator.truediv, difference, MathValue((scale,))))
    return len(scaled[0].points) > 1 and points_match(*scaled)


def lists_match(answers, golds):
    """As many items, and each of one list in the other, in whatever order."""
    rest = list(golds)
    if len(answers) != len(rest):
        return False
    if len({gold.name for gold in golds} - {""}) == len(golds) and not any(x.name for x in answers):
        return all(map(items_match, answers, golds))  # 2, 3 for x = 2, y = 3
    for answer in answers:
        match = next((gold for gold in rest if items_match(answer, gold)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


@functools.lru_cache(100)
def read_math(text):
    """The text in one spelling, and the item that it is, or None if it cannot be read."""
    tokens = tokenize_math(strip_marks(text))
    spelling = re.sub(r"(?<!\\)\{ (\S+) \}", r"\1", " ".join(tokens).replace('"', ""))
    signs = (1, -1) if "±" in tokens or "∓" in tokens else (1,)
    try:
        require(len(tokens) <= MAX_ANSWER_TOKENS, "too long")
        readings = [MathParser([*tokens, END_OF_TEXT], sign).entries(END_OF_TEXT) for sign in signs]
    except (ArithmeticError, TypeError, ValueError):
        return spelling, None
    sets = [r[0].items if len(r) == 1 and r[0].kind == "list" else r for r in readings]
    changed = [minus for plus, minus in zip(sets[0], sets[-1], strict=True) if minus != plus]
    items = (*sets[0], *changed)
    return spelling, items[0] if len(items) == 1 else MathValue(kind="list", items=items)


def strip_marks(text):
    r"""Without the blanks, $, \( \), \[ \], bold marks and the final point around it."""
    text, before = text.strip(), None
    while text != before and len(text) <= MAX_ANSWER_LENGTH:
        before = text
        text = text.strip().strip("$`").rstrip(".,")
        for mark in ("**", r"\(", r"\)", r"\[", r"\]"):
            text = text.removeprefix(mark).removesuffix(mark)
    return text


EDGE = r"[\s$~(){}\\]*"
OPTION = re.compile(rf"{EDGE}([A-Z]){EDGE}(?:\.{EDGE})?")  # C, (C), \text{C}
LONE_CAPITAL = r"(?![AI] [a-z])(?<![A-Za-z])[A-Z](?![A-Za-z])"  # but neither "A dog" nor "I think"
CHOICE = re.compile(  # (C) 19, and no other choice
    rf"{EDGE}([A-Z])[\s$~({{}}\\]*[).:](?!.*{LONE_CAPITAL}).*", re.DOTALL
)
NOT_THE_CHOICE = re.compile(rf"{TEXT_COMMAND}|(?i:\b(?:option|choice|answer)\b:?)")


def answers_match(answer, gold):
    """Is `answer` the same object as `gold`?"""
    if max(len(answer), len(gold)) > MAX_ANSWER_LENGTH or not gold.strip():
        return False
    if re.fullmatch(r"-?[0-9]+", answer) and re.fullmatch(r"-?[0-9]+", gold):
        return int(answer) == int(gold)
    option = OPTION.fullmatch(re.sub(TEXT_COMMAND, "", gold))
    if option:
        text = NOT_THE_CHOICE.sub("", answer)
        choice = OPTION.fullmatch(text) or CHOICE.fullmatch(text)
        return bool(choice and choice[1] == option[1])
    try:
        (spelling, item), (gold_spelling, gold_item) = read_math(answer), read_math(gold)
        if spelling == gold_spelling or item is None or gold_item is None:
            return spelling == gold_spelling != ""
        return items_match(item, gold_item)
    except Exception:  # as promised: nothing is raised, whatever a model writes
        return False


# -- Where the answer stands in a completion

BOX_COMMAND = re.compile(r"\\(?:boxed|fbox)\s*\{")
SPACE = r"(?:[\s$.{}]|\\(?:text|mbox|quad|qquad|[()\[\],; ])){0,30}"
BETWEEN_BOXES = re.compile(rf"(?:{SPACE}(?:[,;]|and|or)){{1,9}}{SPACE}")
MARKERS = (r"####:?(?!.{,30}[Aa]nswer)", r"(?i)answer[*\s]*(?:\bis\b|:|(?=\$|\\[(\[]))")


def find_boxes(text):
    """Beginning, content and end of the last balanced boxes, from the last one backwards."""
    for command in reversed(deque(BOX_COMMAND.finditer(text), maxlen=50)):
        start, depth = command.end(), 1
        for brace in re.finditer(r"(?<!\\)[{}]", text[start : start + MAX_ANSWER_LENGTH]):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                content = text[start : start + brace.start()]
                yield command.start(), content, start + brace.end()
                break


def find_answer(text):
    """The answer as it stands in the text, if any, and what the boxes in a row with it hold."""
    text = re.sub(r"\\boxed *(\d+)", r"\\boxed{\1}", text.rpartition("</think>")[2])
    row, next_begin = [], 0
    for begin, content, end in find_boxes(text):
        if row and not BETWEEN_BOXES.fullmatch(text, end, next_begin):
            break
        row.insert(0, content)
        next_begin = begin
    answer = row[-1] if row else None
    if answer is None and "</answer>" in text:
        answer = text.rpartition("</answer>")[0].rpartition("<answer>")[2]
    for marker in MARKERS:
        found = list(re.finditer(marker, text)) if answer is None else []
        if found:
            rest = text[found[-1].end() :]
            rest = rest.lstrip(" \t\r\n:*`$").removeprefix(r"\[").removeprefix(r"\(").lstrip()
            sentence = re.split(r"[.?](?:\s|$)|\n", rest, maxsplit=1)[0]
            answer = re.sub(r"^The [^=]{1,200}? is ", "", sentence)  # The largest n is 34
    return strip_marks(answer or ""), [strip_marks(content) for content in row]


def extract_answer(text):
    """The last box, else <answer>, else what follows the last ####, "answer is" or "Answer:"."""
    return find_answer(text)[0] or None


def is_correct(completion, gold):
    """The reward: is the completion's answer right? Several boxes are one list, for a gold list."""
    answer, row = find_answer(completion)
    if answers_match(answer, gold):
        return True
    several = len(row) > 1 and all(row) and len(gold) <= MAX_ANSWER_LENGTH
    item = read_math(gold)[1] if several else None
    return item is not None and item.kind == "list" and answers_match(", ".join(row), gold)


def main(argv=None):
    """The command line; bad input ends in one line on stderr and exit status 2."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        train(parse(argv))
        return
    except BadInput as error:
        status, message = 2, str(error)
    except torch.OutOfMemoryError:
        status, message = 2, "out of GPU memory: lower --micro-tokens, --prompts or --max-tokens"
    except KeyboardInterrupt:
        status, message = 130, "stopped; --resume goes on from the last checkpoint"
    except BrokenPipeError:  # as in gmts.py | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    print("gmts.py:", " ".join(message.split())[:1000], file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
