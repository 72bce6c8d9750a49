import type { Point } from './messages';

/** A chart shows each rank as a line up to so many ranks; of more, a band and the outliers. */
export const LINES_UP_TO = 64;
/** Outliers that are named. */
const NAMED_OUTLIERS = 6;
/** How far from the median an outlier is, in robust standard deviations. */
const FAR = 6;

/** A rank that differs from the others, and how: its last value, or null if that is no finite number. */
export interface Outlier {
  readonly rank: number;
  readonly value: number | null;
}

/** The minimum, median and maximum over ranks at one time; NaN where no rank had a number. */
export interface Spread {
  readonly low: number;
  readonly middle: number;
  readonly high: number;
}

/** The values of an expression over ranks and time; the oldest times go when there are too many. */
export class Series {
  readonly times: number[] = [];
  /** By rank: the value at each of `times`; NaN where there is none. */
  readonly values = new Map<number, number[]>();
  readonly spreads: Spread[] = [];
  private _last: readonly Point[] = [];

  constructor(private readonly _limit = 1_200) {}

  get ranks(): number[] {
    return [...this.values.keys()].sort((a, b) => a - b);
  }

  /** Whether there are more ranks than lines can be told apart. */
  get isBand(): boolean {
    return this.values.size > LINES_UP_TO;
  }

  /** Add the values at a time; a time that is not after the last one is known already, as when a plot begins again. */
  push(time: number, points: readonly Point[]): void {
    if (time <= (this.times.at(-1) ?? -Infinity)) {
      return;
    }
    const count = this.times.push(time);
    for (const [rank, value] of points) {
      let line = this.values.get(rank);
      if (!line) {
        line = new Array<number>(count - 1).fill(NaN);
        this.values.set(rank, line);
      }
      line[count - 1] = value ?? NaN;
    }
    for (const line of this.values.values()) {
      if (line.length < count) {
        line.push(NaN);
      }
    }
    this._last = points;
    this.spreads.push(spreadOf(points));
    if (count > this._limit) {
      const going = Math.ceil(this._limit / 10);
      this.times.splice(0, going);
      this.spreads.splice(0, going);
      this.values.forEach(line => line.splice(0, going));
    }
  }

  /** The ranks whose last value is far from those of the others, or no finite number; the farthest first. */
  outliers(): Outlier[] {
    const broken = this._last.filter(([, value]) => !isNumber(value)).map(([rank]) => ({ rank, value: null }));
    const found = this._last.flatMap(([rank, value]) => (isNumber(value) ? [{ rank, value }] : []));
    const { middle } = spreadOf(this._last);
    const deviations = found.map(({ value }) => Math.abs(value - middle)).sort((a, b) => a - b);
    // 1.4826: the standard deviation of a normal distribution over its median deviation.
    const scale = 1.4826 * (deviations[Math.floor(deviations.length / 2)] ?? 0);
    const least = Math.max(scale * FAR, Math.abs(middle) * 1e-6);
    const far =
      found.length < 4
        ? []
        : found
            .filter(({ value }) => Math.abs(value - middle) > least)
            .sort((a, b) => Math.abs(b.value - middle) - Math.abs(a.value - middle));
    return [...broken, ...far].slice(0, NAMED_OUTLIERS);
  }
}

function isNumber(value: number | null): value is number {
  return value !== null && Number.isFinite(value);
}

function spreadOf(points: readonly Point[]): Spread {
  const sorted = points.flatMap(([, value]) => (isNumber(value) ? [value] : [])).sort((a, b) => a - b);
  const half = sorted.length / 2;
  const middle = ((sorted[Math.ceil(half) - 1] ?? NaN) + (sorted[Math.floor(half)] ?? NaN)) / 2;
  return { low: sorted[0] ?? NaN, middle, high: sorted.at(-1) ?? NaN };
}

/** Round numbers for an axis between two values: 1, 2 or 5 times a power of ten apart. */
export function ticks(low: number, high: number, most: number): number[] {
  const span = high - low;
  if (!(span > 0) || most < 1) {
    return Number.isFinite(low) ? [low] : [];
  }
  const rough = span / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find(factor => factor * power >= rough) ?? 10);
  const found: number[] = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) {
    found.push(Number((index * step).toPrecision(12)));
  }
  return found;
}
