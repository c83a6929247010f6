"""Oracles of correction, mismatch and losses, re-derived from their formulas in float64 with plain loops.

Nothing here imports the package or torch: an oracle that shares code with what it judges shares its mistakes. Arrays
are [B][T] of Python floats or numpy; masks hold 0 or 1.
"""

import math
import statistics

import numpy as np


def scored_log_ratios(trainer, rollout, mask):
    """Return per sequence {position: log(pi_trainer / pi_rollout) clamped to +-20} of tokens scored by both sides."""
    sequences = []
    for trainer_T, rollout_T, mask_T in zip(trainer, rollout, mask, strict=True):
        scored = {}
        for t, (a, b, m) in enumerate(zip(trainer_T, rollout_T, mask_T, strict=True)):
            a, b = float(a), float(b)
            if m and math.isfinite(b) and not math.isnan(a) and a != math.inf:
                scored[t] = min(20.0, max(-20.0, a - b))
        sequences.append(scored)
    return sequences


def bounded(r, bound, low, high):
    low, high = (0.0 if low is None else low), (math.inf if high is None else high)
    if bound == "truncate":
        return min(high, max(low, r))
    return r if low <= r <= high else 0.0


def importance_weights(trainer, rollout, mask, level, bound, low, high, normalize=False):
    """Return weights [B, T], and how close the nearest raw ratio is to a bound (relative),
    where `mask` could go either way.
    """
    weights = np.ones(np.shape(mask))
    units, margin = [], math.inf
    for i, scored in enumerate(scored_log_ratios(trainer, rollout, mask)):
        if level == "token":
            groups = [([t], log_r) for t, log_r in scored.items()]
        else:
            log_r = math.fsum(scored.values())
            if level == "geometric" and scored:
                log_r /= len(scored)
            groups = [([t for t, m in enumerate(mask[i]) if m], log_r)] if scored else []
        for positions, log_r in groups:
            r = math.exp(min(20.0, max(-20.0, log_r)))
            margin = min([margin] + [abs(r / edge - 1) for edge in (low, high) if edge])
            units.append((i, positions, bounded(r, bound, low, high)))
    mean = math.fsum(w for _, _, w in units) / len(units) if units else 0.0
    divisor = mean if normalize and mean > 1e-8 else 1.0
    for i, positions, w in units:
        for t in positions:
            weights[i, t] = w / divisor
    return weights, margin


def k3(log_r):
    if abs(log_r) < 1e-3:  # exp(x) - 1 - x loses every digit here; its series does not
        return log_r**2 / 2 + log_r**3 / 6 + log_r**4 / 24 + log_r**5 / 120
    return math.exp(log_r) - 1 - log_r


def keep_mask(trainer, rollout, mask, statistic, low, high, log_centre=0.0):
    """Return the tokens [B, T] that a rejection rule keeps, and the smallest distance to its threshold."""
    keep = np.array(mask, dtype=bool).reshape(np.shape(mask))
    margin = math.inf
    for i, scored in enumerate(scored_log_ratios(trainer, rollout, mask)):
        if not scored:
            continue
        log_rs = list(scored.values())
        if statistic == "sequence_ratio":
            verdicts = {None: math.fsum(log_rs)}
        elif statistic == "geometric_ratio":
            verdicts = {None: math.fsum(log_rs) / len(log_rs) - log_centre}
        else:
            verdicts = dict(scored)
        edges = [math.log(edge) for edge in (low, high) if edge]
        for where, value in verdicts.items():
            margin = min([margin] + [abs(value - edge) / max(1.0, abs(edge)) for edge in edges])
            value = math.exp(value)
            if (low is not None and value < low) or (high is not None and value > high):
                if where is None or statistic == "token_veto":
                    keep[i, :] = False
                else:
                    keep[i, where] = False
    return keep, margin


def typical_log_ratio(trainer, rollout, mask):
    """Return the median over sequences of the mean log-ratio."""
    means = [math.fsum(s.values()) / len(s) for s in scored_log_ratios(trainer, rollout, mask) if s]
    return statistics.median(means) if means else 0.0


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


def effective_sample_size(weights):
    weights = list(weights)
    if not weights:
        return math.nan
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))


def mismatch(trainer, rollout, mask, edges):
    """Return the metrics by their names. `edges` are the lower ends of the position and length bins."""
    sequences = scored_log_ratios(trainer, rollout, mask)
    log_rs = [log_r for scored in sequences for log_r in scored.values()]
    sums = [math.fsum(scored.values()) for scored in sequences if scored]
    means = [math.fsum(scored.values()) / len(scored) for scored in sequences if scored]
    ratios = {
        "": [math.exp(x) for x in log_rs],
        "sequence_": [math.exp(min(20.0, max(-20.0, x))) for x in sums],
        "geometric_": [math.exp(x) for x in means],
    }
    tokens = sum(1 for mask_T in mask for m in mask_T if m)
    missing = broken = clamped = 0
    for trainer_T, rollout_T, mask_T in zip(trainer, rollout, mask, strict=True):
        for a, b, m in zip(trainer_T, rollout_T, mask_T, strict=True):
            a, b = float(a), float(b)
            if not m:
                continue
            if not math.isfinite(b):
                missing += 1
            elif math.isnan(a) or a == math.inf:
                broken += 1
            else:
                clamped += abs(a - b) > 20.0
    metrics = {
        "mismatch/k1_kl": mean(-x for x in log_rs),
        "mismatch/k3_kl": mean(map(k3, log_rs)),
        "mismatch/chi2_token": mean(math.exp(x) ** 2 for x in log_rs) - 1,
        "mismatch/chi2_sequence": mean(r**2 for r in ratios["sequence_"]) - 1,
        "mismatch/ppl_ratio": mean(math.exp(-x) for x in means),
        "mismatch/token_mult_prob_error": mean(math.exp(abs(x)) for x in log_rs),
        "mismatch/logp_difference_mean": mean(map(abs, log_rs)),
        "mismatch/logp_difference_max": max(map(abs, log_rs), default=math.nan),
        "mismatch/fraction_missing": missing / tokens if tokens else math.nan,
        "mismatch/fraction_broken": broken / tokens if tokens else math.nan,
        "mismatch/fraction_clamped": clamped / len(log_rs) if log_rs else math.nan,
    }
    for prefix, r in ratios.items():
        metrics[f"correction/{prefix}ratio_min"] = min(r, default=math.nan)
        metrics[f"correction/{prefix}ratio_mean"] = mean(r)
        metrics[f"correction/{prefix}ratio_max"] = max(r, default=math.nan)
        metrics[f"correction/{prefix}effective_sample_size"] = effective_sample_size(r)
    metrics |= growth(sequences, mask, edges)
    return metrics


def growth(sequences, mask, edges):
    """Return k3 by position, by length, and in the second half of each completion over the first."""
    halves, bins = {"early": [], "late": []}, {}
    for scored, mask_T in zip(sequences, mask, strict=True):
        trained = [t for t, m in enumerate(mask_T) if m]
        rank = {t: n for n, t in enumerate(trained)}
        for t, log_r in scored.items():
            halves["late" if 2 * rank[t] >= len(trained) else "early"].append(k3(log_r))
            for axis, value in (("position", t), ("length", len(trained))):
                low = max(edge for edge in edges if edge <= value)
                higher = [edge for edge in edges if edge > value]
                name = f"{low}-{min(higher) - 1}" if higher else f"{low}+"
                bins.setdefault(f"mismatch/k3_kl/{axis}_{name}", []).append(k3(log_r))
    early, late = mean(halves["early"]), mean(halves["late"])
    metrics = {name: mean(values) for name, values in bins.items()}
    metrics["mismatch/late_over_early"] = late / early if early else math.nan
    return metrics


def correction(trainer, rollout, mask, weights, counted, high):
    """Return metrics of token truncation at `high`, from the weights [B, T] that a loss got: 0 where rejected, and
    without meaning outside of `counted`, the tokens that the loss averages over.
    """
    sequences = scored_log_ratios(trainer, rollout, mask)
    log_rs = [log_r for scored in sequences for log_r in scored.values()]
    loss, used = [], []
    for mask_T, weights_T, counted_T in zip(mask, weights, counted, strict=True):
        loss.append([float(w) for w, c in zip(weights_T, counted_T, strict=True) if c])
        used.append([float(w) if c else 0.0 for m, w, c in zip(mask_T, weights_T, counted_T, strict=True) if m])
    of_loss, of_tokens = sum(loss, []), sum(used, [])
    trained = [one for one in used if one]
    return {
        "correction/weight_min": min(of_loss, default=math.nan),
        "correction/weight_mean": mean(of_loss),
        "correction/weight_max": max(of_loss, default=math.nan),
        "correction/effective_sample_size_used": effective_sample_size(of_tokens),
        "correction/fraction_clipped_high": mean(math.exp(log_r) > high for log_r in log_rs),
        "correction/fraction_masked_tokens": mean(weight == 0 for weight in of_tokens),
        "correction/fraction_masked_sequences": mean(not any(one) for one in trained),
    }


def policy_loss(logps, old, weights, mask, advantages, settings, frozen=None):
    """Compute TRL 1.16's policy loss of one batch, without KL and entropy terms, from its documented formulas.

    Arrays are [B][T]; weights [B][T] are the importance weights of the rollouts. What a loss treats as a constant is
    computed from `frozen`, so that differences in `logps` alone are its gradient. `settings`: loss, level ("token" or
    "sequence"), low, high (clip range), tokens (of all batches that an optimizer step is of), length (longest), and
    what sapo and vespo have: `sapo` and `vespo`, two and four numbers.
    """
    frozen = logps if frozen is None else frozen
    loss, sums, counts = settings["loss"], [], []
    for b, mask_T in enumerate(mask):
        where = [t for t, m in enumerate(mask_T) if m]
        advantage, total = float(advantages[b]), 0.0
        counts.append(len(where))

        def log_ratios(values, b=b, where=where):
            """Return them by token; at the level of sequences each has the mean."""
            log_r = {t: float(values[b][t]) - float(old[b][t]) for t in where}
            if settings["level"] == "sequence" and where:
                log_r = dict.fromkeys(where, math.fsum(log_r.values()) / len(where))
            return log_r

        now, before = log_ratios(logps), log_ratios(frozen)
        if loss == "vespo" and where:
            k, lam = settings["vespo"][:2] if advantage >= 0 else settings["vespo"][2:]
            log_w = math.fsum(min(20.0, max(-20.0, x)) for x in before.values())
            log_w += math.fsum(math.log(max(float(weight), 1e-8)) for weight in weights[b])  # of all T, 1 at padding
            log_w = min(20.0, max(math.log(1e-8), log_w))
            phi = math.exp(lam + k * log_w - lam * math.exp(log_w))
        for t in where:
            r, weight = math.exp(now[t]), float(weights[b][t])
            if loss == "cispo":
                term = -min(math.exp(before[t]), settings["high"]) * advantage * float(logps[b][t])
            elif loss == "sapo":
                temperature = settings["sapo"][0] if advantage > 0 else settings["sapo"][1]
                term = -4 / temperature / (1 + math.exp(-temperature * (r - 1))) * advantage
            elif loss == "vespo":
                term, weight = -phi * advantage * float(logps[b][t]), 1.0
            else:
                clipped = min(1 + settings["high"], max(1 - settings["low"], r))
                term = -min(r * advantage, clipped * advantage)
            total += term * weight
        sums.append(total)
    if loss in ("grpo", "sapo"):
        return mean(total / max(count, 1) for total, count in zip(sums, counts, strict=True))
    if loss == "luspo":
        return mean(sums)
    if loss == "bnpo":
        return math.fsum(sums) / max(sum(counts), 1)
    if loss == "dr_grpo":
        return math.fsum(sums) / (len(sums) * settings["length"])
    return math.fsum(sums) / settings["tokens"]  # dapo, cispo, vespo


def truncated(logits, survivors, targets):
    """Return log-probs of targets and entropies `[N]` of distributions over the survivors' logits alone."""
    log_probs, entropies = [], []
    for row, tokens, target in zip(logits, survivors, targets, strict=True):
        largest = max(row[token] for token in tokens)
        log_z = largest + math.log(math.fsum(math.exp(row[token] - largest) for token in tokens))
        log_p = {token: row[token] - log_z for token in tokens}
        log_probs.append(log_p[target])
        entropies.append(-math.fsum(math.exp(value) * value for value in log_p.values()))
    return log_probs, entropies
