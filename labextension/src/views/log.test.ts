import { beforeEach, describe, expect, it } from 'vitest';
import type { LogLine } from '../model';
import { RequestError } from '../model';
import { AnsweredActions, completeDom, find, settled } from '../testing';
import { LogView } from './log';

beforeEach(() => {
  completeDom(600, 180);
  document.body.replaceChildren();
});

function opened() {
  const actions = new AnsweredActions();
  const view = new LogView(document.body, actions, { mesh: 'u1' });
  const lines = () =>
    [...view.node.querySelectorAll<HTMLElement>('.mk-Log-line')]
      .filter(line => !line.hidden)
      .map(line => line.textContent);
  return { actions, view, lines };
}

const some = (from: number, count: number): LogLine[] =>
  Array.from({ length: count }, (_, index) => [index % 4, 'stdout', ` line ${from + index}`]);

describe('LogView', () => {
  it('shows what there is, then what comes, in order', async () => {
    const { actions, view, lines } = opened();
    expect(actions.last()).toMatchObject({ what: 'log', mesh: 'u1', ranks: [] });
    actions.followed[0]?.({ kind: 'log', id: '', lines: [[1, 'stderr', ' later']], dropped: 0 });
    actions.last().answer({ lines: some(0, 2), dropped: 3 });
    await settled();
    expect(lines()).toEqual(['3 lines were left out', '0 line 0', '1 line 1', '1 later']);
    actions.followed[0]?.({ kind: 'log', id: '', lines: [[2, 'stdout', ' last']], dropped: 0 });
    await settled();
    expect(lines().at(-1)).toBe('2 last');
    expect(find(view.node, '[data-stream=stderr]').textContent).toBe('1 later');
  });

  it('has a text of what is shown, to be saved', async () => {
    const { actions, view } = opened();
    actions.last().answer({ lines: some(0, 3), dropped: 0 });
    await settled();
    expect(view.buffer.text()).toBe('[0]  line 0\n[1]  line 1\n[2]  line 2\n');
    view.buffer.filter({ search: 'LINE 1', ranks: null });
    expect(view.buffer.text()).toBe(' line 1\n');
  });

  it('has only the lines in view in the page', async () => {
    const { view } = opened();
    view.append(some(0, 100_000));
    await settled();
    expect(view.node.querySelectorAll('.mk-Log-line').length).toBeLessThan(60);
    expect(find(view.node, '.mk-Log-count').textContent).toBe('100000 lines');
    expect(find(view.node, '.mk-Log-space').style.height).toBe(`${100_000 * 18}px`);
  });

  it('searches, and shows ranks alone', async () => {
    const { view, lines } = opened();
    view.append(some(0, 20));
    const search = find<HTMLInputElement>(view.node, 'input[type=search]');
    search.value = 'LINE 1';
    search.dispatchEvent(new Event('input'));
    await settled();
    expect(lines()).toHaveLength(11);
    expect(find(view.node, 'mark').textContent).toBe('line 1');
    expect(find(view.node, '.mk-Log-count').textContent).toBe('11 of 20 lines');
    const ranks = find<HTMLInputElement>(view.node, '.mk-Log-ranks');
    ranks.value = '1, 3';
    ranks.dispatchEvent(new Event('input'));
    await settled();
    expect(lines()).toEqual(['1 line 1', '3 line 11', '1 line 13', '3 line 15', '1 line 17', '3 line 19']);
    ranks.value = 'all';
    ranks.dispatchEvent(new Event('input'));
    expect(ranks.getAttribute('aria-invalid')).toBe('true');
  });

  it('says why there is no log', async () => {
    const { actions, lines } = opened();
    actions.last().refuse(new RequestError({ message: 'this mesh was stopped', hint: '' }));
    await settled();
    expect(lines()).toEqual(['this mesh was stopped']);
  });

  it('ends what it follows', () => {
    const { actions, view } = opened();
    view.dispose();
    expect(actions.ended).toBe(1);
    expect(document.body.children).toHaveLength(0);
  });
});
