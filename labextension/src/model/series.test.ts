import { describe, expect, it } from 'vitest';
import { LogBuffer } from './logbuffer';
import type { LogLine, Point } from './messages';
import { LINES_UP_TO, Series, ticks } from './series';

describe('Series', () => {
  it('has a value for each rank at each time, also for ranks that come later', () => {
    const series = new Series();
    series.push(1, [[0, 10]]);
    series.push(2, [
      [0, 11],
      [1, 20]
    ]);
    series.push(3, [[1, 21]]);
    expect(series.values.get(0)).toEqual([10, 11, NaN]);
    expect(series.values.get(1)).toEqual([NaN, 20, 21]);
    expect(series.spreads.map(({ low, middle, high }) => [low, middle, high])).toEqual([
      [10, 10, 10],
      [11, 15.5, 20],
      [21, 21, 21]
    ]);
  });

  it('leaves values alone that it has already', () => {
    const series = new Series();
    series.push(1, [[0, 10]]);
    series.push(2, [[0, 11]]);
    series.push(1, [[0, 10]]);
    series.push(2, [[0, 11]]);
    expect(series.values.get(0)).toEqual([10, 11]);
  });

  it('is a band of more ranks than lines can be told apart', () => {
    const series = new Series();
    const points = (count: number) => Array.from({ length: count }, (_, rank): Point => [rank, rank]);
    series.push(1, points(LINES_UP_TO));
    expect(series.isBand).toBe(false);
    series.push(2, points(LINES_UP_TO + 1));
    expect(series.isBand).toBe(true);
  });

  it('names ranks that are far from the others, and those without a number first', () => {
    const series = new Series();
    const points = Array.from({ length: 100 }, (_, rank): Point => [rank, 1 + (rank % 10) / 100]);
    points[7] = [7, 5];
    points[9] = [9, null];
    series.push(1, points);
    expect(series.outliers()).toEqual([
      { rank: 9, value: null },
      { rank: 7, value: 5 }
    ]);
  });

  it('takes what many do for no exception, and noise of one reading for noise', () => {
    const points = (odd: number) =>
      Array.from({ length: 16 }, (_, rank): Point => [rank, rank < odd ? 9 : 1 + rank / 100]);
    const groups = new Series();
    groups.push(1, points(5));
    expect(groups.outliers()).toEqual([]);
    const noise = new Series();
    [0, 0, 0, 1].forEach((odd, time) => noise.push(time, points(odd)));
    expect(noise.outliers()).toEqual([]);
    [1, 1].forEach((odd, time) => noise.push(10 + time, points(odd)));
    expect(noise.outliers()).toEqual([{ rank: 0, value: 9 }]);
  });

  it('names none where all are alike, or spread evenly, or few', () => {
    for (const value of [() => 3, (rank: number) => rank]) {
      const series = new Series();
      series.push(
        1,
        Array.from({ length: 64 }, (_, rank): Point => [rank, value(rank)])
      );
      expect(series.outliers()).toEqual([]);
    }
    const two = new Series();
    two.push(1, [
      [0, 1],
      [1, 100]
    ]);
    expect(two.outliers()).toEqual([]);
  });

  it('forgets the oldest times', () => {
    const series = new Series(100);
    for (let time = 0; time < 250; time++) {
      series.push(time, [[0, time]]);
    }
    expect(series.times.length).toBeLessThanOrEqual(100);
    expect(series.times.at(-1)).toBe(249);
    expect(series.values.get(0)).toEqual(series.times);
    expect(series.spreads).toHaveLength(series.times.length);
  });
});

describe('ticks', () => {
  it('are round', () => {
    expect(ticks(0, 10, 5)).toEqual([0, 2, 4, 6, 8, 10]);
    expect(ticks(0.13, 0.42, 3)).toEqual([0.2, 0.3, 0.4]);
    expect(ticks(-1, 1, 4)).toEqual([-1, -0.5, 0, 0.5, 1]);
    expect(ticks(5, 5, 4)).toEqual([5]);
    expect(ticks(NaN, NaN, 4)).toEqual([]);
  });
});

describe('LogBuffer', () => {
  const lines = (from: number, count: number): LogLine[] =>
    Array.from({ length: count }, (_, index) => [(from + index) % 4, 'stdout', `line ${from + index}`]);
  const texts = (buffer: LogBuffer) => Array.from({ length: buffer.length }, (_, index) => buffer.line(index)?.[2]);

  it('filters by text and by rank what is there and what comes', () => {
    const buffer = new LogBuffer();
    buffer.append(lines(0, 20));
    buffer.filter({ search: 'LINE 1', ranks: new Set([1]) });
    expect(texts(buffer)).toEqual(['line 1', 'line 13', 'line 17']);
    buffer.append([
      [1, 'stdout', 'line 100'],
      [2, 'stdout', 'line 101'],
      [1, 'stdout', 'other']
    ]);
    expect(texts(buffer)).toEqual(['line 1', 'line 13', 'line 17', 'line 100']);
    expect(buffer.total).toBe(23);
    buffer.filter({ search: '', ranks: null });
    expect(buffer.length).toBe(23);
  });

  it('keeps the last lines, and says how many of the shown ones went', () => {
    const buffer = new LogBuffer(100);
    expect(buffer.append(lines(0, 100))).toBe(0);
    expect(buffer.append(lines(100, 1))).toBe(11);
    expect(texts(buffer)[0]).toBe('line 11');
    buffer.filter({ search: '', ranks: new Set([0]) });
    const before = buffer.length;
    const gone = buffer.append(lines(101, 20));
    expect(buffer.length).toBe(before + 5 - gone);
    expect(texts(buffer).at(-1)).toBe('line 120');
  });

  it('leaves out what terminals alone understand', () => {
    const buffer = new LogBuffer();
    buffer.append([[0, 'stderr', '\u001b[31mred\u001b[0m\r 50%|###\u0007']]);
    expect(texts(buffer)).toEqual(['red 50%|###']);
  });

  it('is empty after it was cleared', () => {
    const buffer = new LogBuffer();
    buffer.append(lines(0, 5));
    buffer.filter({ search: 'line', ranks: null });
    buffer.clear();
    expect([buffer.length, buffer.total]).toEqual([0, 0]);
    buffer.append(lines(5, 1));
    expect(texts(buffer)).toEqual(['line 5']);
  });
});
