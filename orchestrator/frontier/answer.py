"""The best model within bounds, the models that are not significantly worse, and what other bounds buy.

Qualities are compared as in Hsu's multiple comparisons with the best (1984), with Bonferroni's bound in place
of the exact quantile: with a probability of at least 95 % the truly best arm within the bounds is the named
one, or one of those that are not significantly worse. The error of a mean is that of its seeds, pooled over
all arms, and that of the validation images. All arms share these images, but answers are not compared image
by image, so fewer differences are significant than could be.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real

import numpy as np
from scipy.special import stdtrit

from orchestrator.costs import ENERGY, FORWARD, MS_P95, USD
from orchestrator.errors import UsageError
from orchestrator.frontier.points import (
    OPERATING_POINT,
    Point,
    as_shown,
    image_error,
    is_complete,
    knee_point,
    quartiles,
)
from orchestrator.output import IN_BITS
from orchestrator.units import amount, axis_title, number, unit_of

CONFIDENCE = 0.95
MOST_NAMED = 4  # arms of a sentence


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The standard errors of the qualities of a sweep.

    Attributes:
        seed_sd: spread over seeds, pooled over arms; NaN: no arm has several.
        freedom: degrees of freedom of that spread.
        images: on which an accuracy was judged; 0: unknown, or the quality is no accuracy.
        critical: quantile of Student's t, from which a difference of the best and another arm is significant.
    """

    seed_sd: float
    freedom: int
    images: int
    critical: float

    @property
    def known(self) -> bool:
        return bool(self.freedom or self.images)

    def of(self, point: Point) -> float:
        """Returns the standard error of a point's quality."""
        seeds = 0.0 if math.isnan(self.seed_sd) else self.seed_sd**2 / max(len(point.qualities), 1)
        return math.sqrt(seeds + image_error(point.quality, point.images) ** 2)

    def significant(self, point: Point, other: Point) -> float:
        """Returns the smallest difference of two points that is significant."""
        return self.critical * math.hypot(self.of(point), self.of(other))

    def tied(self, best: Point, others: Iterable[Point]) -> tuple[Point, ...]:
        """Returns those of the others that are not significantly worse; none if no error is known."""
        if not self.known:
            return ()
        return tuple(p for p in others if best.quality - p.quality <= self.significant(best, p))

    def least(self, best: Point, quality_name: str) -> str:
        """Says which difference from the best is significant."""
        if not self.known:
            return (
                "No error is known of these qualities, so no difference is significant: take several seeds."
            )
        by = " and ".join(
            [*(["seeds"] if self.freedom else []), *([f"{self.images:,} images"] if self.images else [])]
        )
        lacking = "" if self.freedom else "; of one seed each, whose error is not known"
        size = difference_text(quality_name, best.quality, self.significant(best, best))
        return f"Differences below {size} are not significant (standard errors of {by}{lacking})."


def errors_of(points: Sequence[Point], compared: int) -> Errors:
    """Returns the errors of arms, of which so many are compared with the best of them."""
    groups = [np.array(point.qualities) for point in points if len(point.qualities) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    level = 1 - (1 - CONFIDENCE) / max(compared - 1, 1)  # one-sided, for all arms together
    return Errors(
        seed_sd=math.sqrt(squares / freedom) if freedom else math.nan,
        freedom=freedom,
        images=max(point.images for point in points),
        critical=float(stdtrit(freedom or 1e9, level)),
    )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best point within bounds, and its rivals.

    Attributes:
        bounds: metric of a cost -> the most that it may be; of a measured cost, its upper end.
        best: the point of the highest quality within them; None: no point keeps them.
        tied: the points within them that are not significantly worse, the highest quality first.
        others: the number of points within them that are significantly worse, or worse by an unknown error.
        nearest: where no point keeps the bounds, the one that exceeds them least.
        looser: the cheapest point, by the first bound, of a higher quality than the best; if the other bounds
            keep all of these out, the one that exceeds the bounds least; None: no point is better.
        better: the cheapest point of a significantly higher quality, if that is another one.
        tighter: the best of the points that are cheaper than all of `best` and `tied`.
        errors: of the qualities.
    """

    bounds: Mapping[str, float]
    quality_name: str
    best: Point | None
    tied: tuple[Point, ...] = ()
    others: int = 0
    nearest: Point | None = None
    looser: Point | None = None
    better: Point | None = None
    tighter: Point | None = None
    errors: Errors
    unknown: tuple[str, ...] = ()

    @property
    def cheapest(self) -> Point | None:
        """The cheapest, by the first bound, of the best and those that are not significantly worse."""
        named = (self.best, *self.tied) if self.best else ()
        return min(named, key=self._upper, default=None)

    def _upper(self, point: Point) -> float:
        return upper(point, next(iter(self.bounds)))

    def lines(self) -> list[str]:
        """Returns the answer in words."""
        first = next(iter(self.bounds))
        said = " and ".join(f"{amount(name, most)} ({_what(name)})" for name, most in self.bounds.items())
        if self.best is None:
            if self.nearest is None:
                return [f"No finished arm has these costs: {said}."]
            return [
                f"No arm is within {said}.",
                f"The nearest is {self._named(self.nearest)}. What would have to change: a bound of"
                f" {self._exceeded(self.nearest)}; or a smaller model, fewer layers, smaller images.",
            ]
        lines = [f"Best within {said}: {self._named(self.best)}."]
        if self.tied:
            each = "; ".join(map(self._named, self.tied))
            lines.append(f"Not significantly worse ({CONFIDENCE:.0%}): {each}.")
            if (cheapest := self.cheapest) is not None and cheapest is not self.best:
                lines.append(f"The cheapest of these is {cheapest.arm}.")
        elif self.others:
            how = "significantly worse" if self.errors.known else "worse, by an unknown error"
            which = "1 other arm is" if self.others == 1 else f"{self.others} other arms are"
            lines.append(f"Within the bound, {which} {how}.")
        else:
            lines.append("No other arm is within the bound.")
        if self.looser is not None:
            gain = self.looser.quality - self.best.quality
            significant = self.errors.known and gain > self.errors.significant(self.looser, self.best)
            doubt = "" if significant else "; the difference is not significant"
            bound = self._exceeded(self.looser)
            lines.append(f"A looser bound, {bound}, admits {self._named(self.looser)}{doubt}.")
            if self.better is not None:
                bound = self._exceeded(self.better)
                lines.append(f"Significantly better, with {bound}, is {self._named(self.better)}.")
        else:
            lines.append("No looser bound admits a better arm of this sweep.")
        if self.tighter is not None:
            bound = amount(first, _up(self.tighter, first))
            lines.append(f"A tighter bound, {bound}, still admits {self._named(self.tighter)}.")
        lines.append(self.errors.least(self.best, self.quality_name))
        for point in (self.best, *self.tied):
            if point.together > 1:
                lines.append(
                    f"{point.arm} routes {point.together} images together: its quality is that of images in"
                    " such groups, and another for images one by one."
                )
            if OPERATING_POINT in point.settings:
                lines.append(f"{point.arm} is an operating point, chosen on the images that judge it.")
        if self.unknown:
            lines.append(f"Not judged, because a cost is unknown: {', '.join(self.unknown)}.")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _named(self, point: Point) -> str:
        title = axis_title(as_shown(self.quality_name, point.quality)[0]).removeprefix("Validation ")
        costs = ", ".join(_with_end(point, name) for name in self.bounds)
        return f"{point.arm}, {title} {point.quality_text}, {costs}"

    def _exceeded(self, point: Point) -> str:
        """Returns the bounds that would admit a point, in place of those that it exceeds."""
        over = [name for name, most in self.bounds.items() if upper(point, name) > most]
        return " and ".join(amount(name, _up(point, name)) for name in over)


_WHAT = {
    MS_P95: "95th percentile of a call",
    "infer/batch_ms_per_image": "an image of a batch",
    "infer/memory_mib": "peak memory",
    "infer/file_mb": "size of the file",
    ENERGY: "energy of an image",
    USD: "a million images",
    FORWARD: "forward pass of an image",
}


def _what(cost_name: str) -> str:
    return _WHAT.get(cost_name, axis_title(cost_name))


def difference_text(quality_name: str, quality: float, less: float) -> str:
    """Returns a difference from a quality in the unit that readers know: points, or bits of a likelihood."""
    if quality_name in IN_BITS:
        return f"{less / (quality * math.log(2)):.3f} bits"
    return f"{100 * less:.1f} points"


def verdict(points: Sequence[Point], *, quality_name: str, cost_name: str) -> list[str]:
    """Returns the result in words: the best arm, the knee, and which differences are significant. Empty for
    fewer than two finished points.
    """
    finished = sorted(filter(is_complete, points), key=lambda point: (-point.quality, point.cost))
    if len(finished) < 2:
        return []
    errors, (best, *rest) = errors_of(finished, len(finished)), finished
    tied = errors.tied(best, rest)
    title = axis_title(as_shown(quality_name, best.quality)[0]).removeprefix("Validation ")
    lines = [f"Best: {best.arm}, {title} {best.quality_text}."]
    if tied:
        names = ", ".join(point.arm for point in tied[:MOST_NAMED])
        more = f" and {len(tied) - MOST_NAMED} more" if len(tied) > MOST_NAMED else ""
        lines[0] += f" Not significantly worse ({CONFIDENCE:.0%}): {names}{more}."
    knee = knee_point(finished)
    if knee is not best:
        less = difference_text(quality_name, best.quality, best.quality - knee.quality)
        doubt = ", a difference that is not significant," if knee in tied else ""
        lines.append(
            f"Knee, the best trade on the frontier: {knee.arm}, {title} {knee.quality_text}, {less}"
            f" worse{doubt} for {knee.cost / best.cost:.0%} of the cost, {axis_title(cost_name)}."
        )
    return [*lines, errors.least(best, quality_name)]


def upper(point: Point, cost_name: str) -> float:
    """Returns the upper end of a cost; infinite where it is unknown."""
    if cost_name not in point.costs or not math.isfinite(point.costs[cost_name]):
        return math.inf
    return quartiles(replace(point, cost=point.costs[cost_name]), cost_name)[1]


def _up(point: Point, cost_name: str) -> float:
    """Returns the least bound in the digits of `number` that admits a point."""
    most = upper(point, cost_name)
    digit = 10.0 ** (math.floor(math.log10(most)) - 3)
    return math.ceil(most / digit * (1 - 1e-12)) * digit


def _with_end(point: Point, cost_name: str) -> str:
    cost, high = point.costs[cost_name], upper(point, cost_name)
    unit = unit_of(cost_name, [cost])
    end = f" (up to {number(high / unit.size)})" if high > cost else ""
    return f"{number(cost / unit.size)}{end} {unit.symbol}".rstrip()


def answer(points: Sequence[Point], bounds: Mapping[str, float], *, quality_name: str) -> Answer:
    """Returns the answer for these points.

    Raises:
        UsageError: for no bounds, a bound that is no finite number above 0, or if no point is finished.
    """
    if not bounds:
        raise UsageError("give at least one bound, such as `max_ms` 5")
    for name, most in bounds.items():
        if not isinstance(most, Real) or not 0 < most < math.inf:
            raise UsageError(f"a bound of {name} must be a number above 0, got {most!r}")
    finished = [point for point in points if is_complete(point)]
    if not finished:
        raise UsageError("no arm has finished: there is nothing to choose from")
    first = next(iter(bounds))
    known = [point for point in finished if all(upper(point, name) < math.inf for name in bounds)]
    within = [point for point in known if all(upper(point, name) <= most for name, most in bounds.items())]
    within.sort(key=lambda point: (-point.quality, upper(point, first)))
    errors = errors_of(finished, len(within))
    unknown = tuple(point.arm for point in finished if point not in known)

    def excess(point: Point) -> float:
        return max(upper(point, name) / most for name, most in bounds.items())

    if not within:
        nearest = min(known, key=excess, default=None)
        return Answer(
            bounds=bounds,
            quality_name=quality_name,
            best=None,
            nearest=nearest,
            errors=errors,
            unknown=unknown,
        )
    best, *rest = within
    tied = errors.tied(best, rest)
    others = {name: most for name, most in bounds.items() if name != first}
    better = sorted((p for p in known if p not in within and p.quality > best.quality), key=excess)
    # Of several bounds the first is loosened, unless that admits nothing.
    dearer = [p for p in better if all(upper(p, name) <= most for name, most in others.items())] or better
    above = (p for p in dearer if errors.known and p.quality - best.quality > errors.significant(p, best))
    looser, better = next(iter(dearer), None), next(above, None)
    least = min(upper(point, first) for point in (best, *tied))
    cheaper = [point for point in rest if upper(point, first) < least]
    return Answer(
        bounds=bounds,
        quality_name=quality_name,
        best=best,
        tied=tied,
        others=len(rest) - len(tied),
        looser=looser,
        better=None if better is looser else better,
        tighter=max(cheaper, key=lambda point: point.quality, default=None),
        errors=errors,
        unknown=unknown,
    )
