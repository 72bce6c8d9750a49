import type { Point } from './messages';

/** A chart shows each rank as a line up to so many ranks; of more, a band and the outliers. */
export const LINES_UP_TO = 64;
/** Outliers that are named. */
const NAMED_OUTLIERS = 6;
/** A number stands out if its distance from the median is this many times the median distance. */
const FAR = 6;
/** Among fewer numbers than this, none is far. */
const FEWEST = 4;
/** A rank is named when it stands out for so many readings, so that noise is not. */
const LASTING = 3;

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
  /** For how many readings a rank has stood out, without a break. */
  private _standing: ReadonlyMap<number, number> = new Map();

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
    const standing = new Map<number, number>();
    for (const { rank } of standingOut(points)) {
      standing.set(rank, (this._standing.get(rank) ?? 0) + 1);
    }
    this._standing = standing;
    this.spreads.push(spreadOf(points));
    if (count > this._limit) {
      const going = Math.ceil(this._limit / 10);
      this.times.splice(0, going);
      this.spreads.splice(0, going);
      this.values.forEach(line => line.splice(0, going));
    }
  }

  /**
   * The ranks that stood out in each of the last three readings: those without a finite number first, then those far
   * from the others, the farthest first.
   */
  outliers(): Outlier[] {
    const wanted = Math.min(LASTING, this.times.length);
    return standingOut(this._last)
      .filter(({ rank }) => (this._standing.get(rank) ?? 0) >= wanted)
      .slice(0, NAMED_OUTLIERS);
  }
}

/** By the rule of `monarch_kernel/display/quantities.py`; ranks without a finite number are always among them. */
function standingOut(points: readonly Point[]): Outlier[] {
  const broken = points.filter(([, value]) => !isNumber(value)).map(([rank]) => ({ rank, value: null }));
  const { middle } = spreadOf(points);
  const found = points.flatMap(([rank, value]) =>
    isNumber(value) ? [{ rank, value, gap: Math.abs(value - middle) }] : []
  );
  const { middle: spread } = spreadOf(found.map(({ rank, gap }): Point => [rank, gap]));
  const least = Math.max(FAR * spread, Math.abs(middle) * 1e-9);
  const far = points.length < FEWEST ? [] : found.filter(({ gap }) => gap > least);
  // What more than a quarter does is another group, and no exception.
  const exceptional = (broken.length + far.length) * 4 <= points.length ? far : [];
  return [...broken, ...exceptional.sort((a, b) => b.gap - a.gap).map(({ rank, value }) => ({ rank, value }))];
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
