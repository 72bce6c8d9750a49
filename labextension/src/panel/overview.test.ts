import { beforeEach, describe, expect, it } from 'vitest';
import { FeedClient } from '../model';
import { AnsweredActions, aRank, aSnapshot, completeDom, find } from '../testing';
import { MeshOverview } from './overview';

const MEGA = 1e6;
const titles = (node: HTMLElement) => [...node.querySelectorAll('.mk-Chart-title')].map(each => each.textContent);

beforeEach(() => {
  completeDom();
  document.body.replaceChildren();
});

describe('MeshOverview', () => {
  it('notes what living ranks use, draws expressions, and ends all of it', () => {
    const client = new FeedClient(() => undefined);
    const actions = new AnsweredActions();
    const ranks = [0, 1, 2].map(rank =>
      aRank(rank, { rss: (rank + 1) * 100 * MEGA, cpu: 10, state: rank === 2 ? 'dead' : 'idle' })
    );
    client.receive(aSnapshot(ranks));
    const overview = new MeshOverview(document.body, client.store, actions, client, 'u1');
    const charts = () => [...overview.node.querySelectorAll('.mk-Chart')];
    expect(titles(overview.node)).toEqual(['Memory (MB)', 'Processor (%)']);
    expect(find(overview.node, '.mk-Chart-news').textContent).toBe('median 150');
    expect(find(overview.node, '.mk-Chart-area').getAttribute('aria-label')).toContain('ranks 0, 1');

    const form = find(overview.node, 'form') as HTMLFormElement;
    const input = find(overview.node, 'form input') as HTMLInputElement;
    form.dispatchEvent(new Event('submit', { cancelable: true }));
    expect(actions.plotted).toHaveLength(0);
    expect(document.activeElement).toBe(input);
    input.value = ' loss ';
    form.dispatchEvent(new Event('submit', { cancelable: true }));
    expect(titles(overview.node)).toEqual(['Memory (MB)', 'Processor (%)', 'loss']);
    actions.plotted[0]?.({ kind: 'points', id: '', time: 1, values: [[0, 0.5]] });
    expect(charts()[2]?.textContent).toContain('median 0.5');
    find(overview.node, '[aria-label="Remove the plot of loss"]').click();
    expect(actions.ended).toBe(1);
    expect(charts()).toHaveLength(2);

    client.close();
    expect(overview.node.textContent).toContain('The kernel has gone');
    overview.dispose();
    expect(document.body.children).toHaveLength(0);
  });
});
