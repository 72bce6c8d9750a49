import { beforeEach, describe, expect, it } from 'vitest';
import type { Point } from '../model';
import { MeshStore } from '../model';
import { AnsweredActions, aRank, aSnapshot, completeDom, find, settled } from '../testing';
import { LineChart } from './chart';
import { HostsTable } from './hosts';

beforeEach(() => {
  completeDom();
  document.body.replaceChildren();
});

describe('LineChart', () => {
  it('says the median, names outliers, and tells screen readers', () => {
    const actions = new AnsweredActions();
    const chart = new LineChart(document.body, 'loss', actions, { mesh: 'u1', expression: 'loss', period: 1 });
    const points = Array.from({ length: 8 }, (_, rank): Point => [rank, 0.5]);
    const message = { kind: 'points', id: '', time: 1, values: points } as const;
    actions.plotted[0]?.(message);
    expect(find(chart.node, '.mk-Chart-news').textContent).toBe('median 0.5');
    points[3] = [3, 9];
    points[4] = [4, null];
    for (const time of [2, 3, 4]) {
      actions.plotted[0]?.({ ...message, time });
    }
    const news = 'rank 4: no finite number · rank 3: 9';
    expect(find(chart.node, '.mk-Chart-news').textContent).toBe(news);
    expect(find(chart.node, '[role=img]').getAttribute('aria-label')).toContain('ranks 0-7');
    actions.plotted[0]?.({ ...message, time: 5, values: [], error: 'rank 5: there is no loss', ended: true });
    expect(find(chart.node, '.mk-Chart-said').textContent).toBe('rank 5: there is no loss');
    expect(chart.series.times).toEqual([1, 2, 3, 4]);
    chart.setGone(true);
    expect(find(chart.node, '.mk-Chart-said').textContent).toContain('The kernel has gone');
    chart.dispose();
    expect(actions.ended).toBe(1);
    expect(document.body.children).toHaveLength(0);
  });
});

describe('the axis of times of a LineChart', () => {
  /** The texts that are drawn below the axis, the last values' first. */
  let labels: string[] = [];

  beforeEach(() => {
    const fillText = (text: string, _x: number, y: number) => void (y > 380 && labels.push(text));
    const context = new Proxy(
      {},
      { get: (_, name) => (name === 'fillText' ? fillText : () => undefined), set: () => true }
    );
    HTMLCanvasElement.prototype.getContext = (() => context) as never;
  });

  async function draw(seconds: number): Promise<string[]> {
    const actions = new AnsweredActions();
    const chart = new LineChart(document.body, 'loss', actions, { mesh: 'u1', expression: 'loss', period: 1 });
    labels = [];
    const told = (message: object) =>
      actions.plotted[0]?.({ kind: 'points', id: '', time: 1e9, values: [], ...message });
    for (let at = 0; at <= 4; at++) {
      told({ time: 1e9 + (seconds * at) / 4, values: [[0, at]] });
    }
    await settled();
    const live = labels;
    labels = [];
    told({ error: 'rank 0: no number' });
    told({ error: '' });
    expect(find(chart.node, '.mk-Chart-said').textContent).toBe('');
    told({ ended: true });
    await settled();
    expect(labels).toEqual(['end', ...live.slice(1)]);
    find(chart.node, '[role=img]').dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowLeft' }));
    await settled();
    expect(find(chart.node, '.mk-Chart-readout').textContent).toMatch(/^at the end/);
    chart.dispose();
    return live;
  }

  it('counts back from the last values, each label once, and says when these are the end', async () => {
    expect(await draw(3)).toEqual(['now', '−2 s', '−4 s', '−6 s', '−8 s', '−10 s']);
    expect(await draw(17)).toEqual(['now', '−5 s', '−10 s', '−15 s']);
    expect(await draw(100)).toEqual(['now', '−30 s', '−1 min', '−1 min 30 s']);
    expect(await draw(700)).toEqual(['now', '−5 min', '−10 min']);
  });

  it('has the last values of a plot that has just begun at its right', async () => {
    const lines: number[] = [];
    const draws: Record<string, unknown> = { lineTo: (x: number) => lines.push(x) };
    const context = new Proxy({}, { get: (_, name) => draws[String(name)] ?? (() => undefined), set: () => true });
    HTMLCanvasElement.prototype.getContext = (() => context) as never;
    const chart = new LineChart(document.body, 'loss');
    chart.push(1e9, [[0, 1]]);
    chart.push(1e9 + 1, [[0, 2]]);
    await settled();
    expect(lines.at(-1)).toBe(600 - 34);
    chart.dispose();
  });
});

describe('HostsTable', () => {
  it('has a row for each host, with the worst state of its ranks, and figures that change in place', async () => {
    const store = new MeshStore();
    const table = new HostsTable(document.body, store);
    const ranks = [aRank(0), aRank(1, { state: 'dead' }), aRank(2, { host: 'h2' })];
    const gpu = { index: 0, name: 'H100', use: 40, memory_used: 1e9, memory_total: 8e10 };
    store.apply({
      ...aSnapshot(ranks),
      hosts: [
        {
          key: 'h1',
          name: 'b',
          cores: 96,
          cpu: 50,
          memory_used: 1e9,
          memory_total: 4e9,
          gpus: [gpu, { ...gpu, use: 60 }]
        },
        { key: 'h2', name: 'c' }
      ]
    });
    await settled();
    const rows = () => [...table.node.querySelectorAll('tbody tr')];
    const cells = (row: number) => [...(rows()[row]?.children ?? [])].map(cell => cell.textContent);
    expect(cells(0)).toEqual(['b', '2', '50 % of 96', '1.0 GB of 4.0 GB', '50 % of 2']);
    expect(cells(1)).toEqual(['c', '1', '–', '–', '–']);
    expect(find(table.node, '.mk-Icon').dataset['state']).toBe('dead');
    const first = rows()[0];
    store.apply({
      kind: 'changes',
      base: 1,
      version: 2,
      time: 1,
      hosts: [{ key: 'h1', name: 'b', gone: 'timed out' }],
      gone: { hosts: ['h2'] }
    });
    await settled();
    expect(rows()).toEqual([first]);
    expect(cells(0)[1]).toBe('unreachable');
    expect(first?.getAttribute('title')).toBe('timed out');
    table.dispose();
    expect(document.body.children).toHaveLength(0);
  });
});
