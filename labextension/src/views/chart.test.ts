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
