import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import type { Connection, RankView } from '../model';
import { MeshStore, RequestError } from '../model';
import { AnsweredActions, aRank, aSnapshot, completeDom, find, settled } from '../testing';
import { MeshBoard, type BoardOptions } from './board';

const SIGKILL = 'killed by signal 9 (SIGKILL)';

let board: MeshBoard | undefined;

beforeEach(() => completeDom());

afterEach(() => {
  board?.dispose();
  board = undefined;
  document.body.replaceChildren();
});

function opened(ranks: readonly RankView[], options: BoardOptions = {}) {
  const store = new MeshStore();
  const actions = new AnsweredActions();
  store.apply(aSnapshot(ranks));
  const made = new MeshBoard(document.body, store, actions, options);
  board = made;
  let version = 1;
  const change = async (fields: Record<string, object>) => {
    store.apply({ kind: 'changes', base: version, version: ++version, time: 1, ranks: { u1: fields } });
    await settled();
  };
  return { store, actions, board: made, node: made.node, change };
}

const texts = (root: ParentNode, selector: string) =>
  [...root.querySelectorAll(selector)].map(each => each.textContent);
const card = (root: ParentNode, rank: number) => find<HTMLButtonElement>(root, `.mk-Card:nth-of-type(${rank + 1})`);
const buttonOf = (root: ParentNode, name: string) => {
  const found = [...root.querySelectorAll('button')].find(each => each.textContent === name);
  if (!found) {
    throw new Error(`no button ${name}`);
  }
  return found;
};
const pressKey = (key: string) =>
  document.activeElement?.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));

describe('MeshBoard', () => {
  it('says that it waits, that there is no mesh, and shows one that comes', async () => {
    const store = new MeshStore();
    board = new MeshBoard(document.body, store, new AnsweredActions());
    expect(find(board.node, '.mk-Board-empty').textContent).toContain('Waiting');
    store.apply({ ...aSnapshot([]), meshes: [], ranks: {} });
    await settled();
    expect(find(board.node, '.mk-Board-empty').textContent).toContain('%mesh up');
    store.apply(aSnapshot([aRank(0)], 2));
    await settled();
    expect(find(board.node, '.mk-Board-empty').hidden).toBe(true);
    expect(texts(board.node, '.mk-Card-rank')).toEqual(['0']);
  });

  it('tells the worst first, changes only what changed, and keeps every element', async () => {
    const { node, change } = opened(Array.from({ length: 8 }, (_, rank) => aRank(rank)));
    expect(find(node, '.mk-News-headline').textContent).toContain('8 ranks');
    const cards = [...node.querySelectorAll('.mk-Card')];
    await change({ '3': { state: 'dead', cause: SIGKILL } });
    expect(find(node, '.mk-News-news').textContent).toBe(`1 dead: ${SIGKILL}`);
    expect(find(node, '.mk-News-headline').dataset['state']).toBe('dead');
    expect(find(node, '.mk-News-worst').textContent).toContain('rank 3 on name-of-h1');
    expect(find(node, '.mk-Spoken').textContent).toContain(SIGKILL);
    expect([...node.querySelectorAll('.mk-Card')]).toEqual(cards);
    expect(card(node, 3).getAttribute('aria-label')).toBe(`rank 3, dead: ${SIGKILL}, on name-of-h1`);
    expect(texts(node, '.mk-Legend-chip')).toEqual(['dead1', 'idle7']);
    await change({ '3': { state: 'idle', cause: '' } });
    // The place of a state that was seen stays.
    expect(texts(node, '.mk-Legend-chip')).toEqual(['dead0', 'idle8']);
    expect(find(node, '.mk-Spoken').textContent).toBe('');
  });

  it('leads from the news and the legend to ranks', async () => {
    const chosen: number[] = [];
    const ranks = [aRank(0), aRank(1, { state: 'dead', cause: SIGKILL }), aRank(2), aRank(3, { state: 'dead' })];
    const { node, board: shown } = opened(ranks, { selected: (_mesh, rank) => chosen.push(rank) });
    find(node, '.mk-News-worst').click();
    find(node, '.mk-Legend-chip').click();
    find(node, '.mk-Legend-chip').click();
    expect(chosen).toEqual([1, 3, 1]);
    expect(card(node, 1).getAttribute('aria-pressed')).toBe('true');
    shown.select(-1);
    expect(find(node, '.mk-Details').hidden).toBe(true);
    expect(card(node, 1).hasAttribute('aria-pressed')).toBe(false);
  });

  it('lists further troubles and what failed before, when asked', () => {
    const store = new MeshStore();
    const failure = {
      number: 1,
      time: 90,
      mesh: 'u1',
      ranks: [2],
      kind: 'error' as const,
      text: 'step: out of memory'
    };
    const other = { ...failure, number: 2, mesh: 'u2', text: 'of another mesh' };
    const ranks = [aRank(0, { state: 'dead', cause: SIGKILL }), aRank(1, { state: 'stopped' }), aRank(2)];
    store.apply({ ...aSnapshot(ranks), failures: [failure, other] });
    board = new MeshBoard(document.body, store, new AnsweredActions());
    const more = find(board.node, '.mk-News-more');
    expect(more.textContent).toBe('2 more');
    expect(find(board.node, '.mk-News-list').hidden).toBe(true);
    more.click();
    expect(more.getAttribute('aria-expanded')).toBe('true');
    const lines = texts(board.node, '.mk-News-line');
    expect(lines[0]).toContain('rank 1 on name-of-h1');
    expect(lines[1]).toContain('rank 2 · step: out of memory');
    find(board.node, 'li:nth-child(2) .mk-News-line').click();
    expect(find(board.node, '.mk-Details-title').textContent).toBe('Rank 2 · idle');
  });

  it('shows the ranks of a slice alone', () => {
    const ranks = [aRank(0, { state: 'dead' }), aRank(1), aRank(2)];
    const { node } = opened(ranks, { mesh: 'u1', ranks: [1, 2] });
    expect(texts(node, '.mk-Card-rank')).toEqual(['1', '2']);
    expect(find(node, '.mk-News-headline').textContent).toContain('2 ranks');
    expect(find(node, '.mk-News-news').textContent).toBe('idle');
  });

  it('has a tab for each mesh, and shows the current one first', async () => {
    const store = new MeshStore();
    store.apply({
      ...aSnapshot([aRank(0)]),
      meshes: [
        { key: 'u1', name: 'm' },
        { key: 'u2', name: 'n', current: true }
      ],
      ranks: { u1: [aRank(0)], u2: [aRank(0, { mesh: 'u2', state: 'dead' })] }
    });
    const made = (board = new MeshBoard(document.body, store, new AnsweredActions()));
    expect(made.mesh).toBe('u2');
    expect(texts(made.node, '.mk-Meshes .mk-Tab')).toEqual(['m', 'n']);
    find(made.node, '.mk-Meshes .mk-Tab').click();
    expect(made.mesh).toBe('u1');
    expect(find(made.node, '.mk-News-news').textContent).toBe('idle');
    store.apply({ kind: 'changes', base: 1, version: 2, time: 1, gone: { meshes: ['u1'] } });
    await settled();
    expect(made.mesh).toBe('u2');
    expect(find(made.node, '.mk-Meshes').hidden).toBe(true);
  });

  it('keeps the last state of a mesh that ended, and of a kernel that has gone', async () => {
    let tell: (connection: Connection) => void = () => undefined;
    const connection = {
      connection: 'live' as Connection,
      onConnection: (listener: typeof tell) => {
        tell = listener;
        return () => undefined;
      }
    };
    const { store, node } = opened([aRank(0), aRank(1)], { mesh: 'u1', connection });
    expect(find(node, '.mk-Banner').hidden).toBe(true);
    connection.connection = 'gone';
    tell('gone');
    expect(find(node, '.mk-Banner').textContent).toContain('The kernel has gone');
    expect(node.hasAttribute('data-gone')).toBe(true);
    connection.connection = 'live';
    tell('live');
    expect(find(node, '.mk-Banner').hidden).toBe(true);
    store.apply({ kind: 'changes', base: 1, version: 2, time: 1, gone: { meshes: ['u1'] } });
    await settled();
    expect(find(node, '.mk-Banner').textContent).toContain('This mesh has ended');
    expect(texts(node, '.mk-Card-rank')).toEqual(['0', '1']);
  });

  it('has the record of a mesh that ended before it was seen', async () => {
    const store = new MeshStore();
    board = new MeshBoard(document.body, store, new AnsweredActions(), {
      mesh: 'u1',
      record: 'm · 4 idle <b>at</b> 12:03:44'
    });
    expect(find(board.node, '.mk-Board-empty').textContent).toContain('Waiting');
    store.apply({ ...aSnapshot([]), meshes: [], ranks: {} });
    await settled();
    expect(find(board.node, '.mk-Board-empty').textContent).toContain('This mesh has ended');
    expect(find(board.node, '.mk-Record').textContent).toBe('m · 4 idle <b>at</b> 12:03:44');
  });

  it('says that nothing has failed only where nothing has', async () => {
    const { store, node, change } = opened([aRank(0), aRank(1)]);
    expect(find(node, '.mk-News-worst').textContent).toBe('Nothing has failed');
    await change({ '1': { failures: 2, calls: 3 } });
    expect(find(node, '.mk-News-worst').textContent).toBe('2 calls have failed');
    const text = 'cell [5] failed: ValueError: boom';
    const failure = { number: 1, time: store.now() - 40, mesh: 'u1', ranks: [1], kind: 'error' as const, text };
    store.apply({ kind: 'changes', base: 2, version: 3, time: 1, failures: [failure] });
    await settled();
    expect(find(node, '.mk-News-worst').textContent).toBe(`Nothing is wrong now; 40 s ago, rank 1: ${text}`);
  });

  it('leaves nothing behind', () => {
    const { store, board: made } = opened([aRank(0)]);
    made.select(0);
    made.dispose();
    expect(document.body.children).toHaveLength(0);
    store.apply(aSnapshot([aRank(0), aRank(1)], 9));
    expect(document.body.children).toHaveLength(0);
  });

  it('is reached by keys: one stop among the cards', () => {
    const { node } = opened(Array.from({ length: 4 }, (_, rank) => aRank(rank)));
    const stops = () => [...node.querySelectorAll<HTMLElement>('.mk-Card')].map(each => each.tabIndex);
    expect(stops()).toEqual([0, -1, -1, -1]);
    card(node, 0).focus();
    pressKey('ArrowRight');
    expect(document.activeElement).toBe(card(node, 1));
    expect(stops()).toEqual([-1, 0, -1, -1]);
    pressKey('End');
    expect(document.activeElement).toBe(card(node, 3));
  });
});

describe('the cells of many ranks', () => {
  const many = (hosts: number, each: number) =>
    Array.from({ length: hosts * each }, (_, rank) => aRank(rank, { host: `h${Math.floor(rank / each)}` }));

  it('are a button that the arrow keys move, and that says what it is on', () => {
    const { node } = opened(many(8, 8));
    const stop = () => find<HTMLButtonElement>(node, '.mk-Cells-stop');
    expect(stop().getAttribute('aria-label')).toBe('rank 0, idle, on name-of-h0');
    stop().focus();
    pressKey('ArrowRight');
    pressKey('ArrowDown');
    expect(document.activeElement).toBe(stop());
    expect(node.querySelectorAll('.mk-Cells-stop')).toHaveLength(1);
    const label = stop().getAttribute('aria-label') ?? '';
    expect(label).toMatch(/^rank \d+, idle, on name-of-h\d$/);
    expect(label).not.toContain('rank 1,');
    pressKey('End');
    expect(stop().getAttribute('aria-label')).toContain('rank 63');
    stop().click();
    expect(find(node, '.mk-Details-title').textContent).toBe('Rank 63 · idle');
  });

  it('are bars of hosts above 256 ranks, each of which opens and closes', () => {
    const { node } = opened(many(64, 8).map(rank => (rank.rank === 9 ? { ...rank, state: 'dead' as const } : rank)));
    const grid = find(node, '.mk-Grid');
    expect(grid.dataset['mode']).toBe('hosts');
    const stop = () => find<HTMLButtonElement>(node, '.mk-Cells-stop');
    stop().focus();
    pressKey('ArrowRight');
    expect(stop().getAttribute('aria-label')).toBe('name-of-h1: 1 dead, 7 idle');
    stop().click();
    expect(grid.dataset['mode']).toBe('cells');
    expect(find(node, '.mk-Grid-place').textContent).toBe('name-of-h1');
    expect(stop().getAttribute('aria-label')).toBe('rank 8, idle, on name-of-h1');
    stop().focus();
    pressKey('Escape');
    expect(grid.dataset['mode']).toBe('hosts');
    expect(stop().getAttribute('aria-label')).toContain('name-of-h1');
    buttonOf(node, 'Ranks').click();
    expect(grid.dataset['mode']).toBe('cells');
    expect(stop().getAttribute('aria-label')).toContain('rank 0');
  });

  it('open the host of a rank that the news lead to', async () => {
    const { node, change } = opened(many(64, 8));
    const grid = find(node, '.mk-Grid');
    find<HTMLButtonElement>(node, '.mk-Cells-stop').click();
    expect(find(node, '.mk-Grid-place').textContent).toBe('name-of-h0');
    await change({ '80': { state: 'dead', cause: SIGKILL } });
    find(node, '.mk-News-worst').click();
    expect(grid.dataset['zoomed']).toBe('true');
    expect(find(node, '.mk-Grid-place').textContent).toBe('name-of-h10');
    expect(find(node, '.mk-Details-title').textContent).toBe('Rank 80 · dead');
  });
});

describe('the details of a rank', () => {
  const shown = (rank: RankView) => {
    const all = opened([rank]);
    all.board.select(0);
    return { ...all, details: find(all.node, '.mk-Details') };
  };
  const tab = (root: ParentNode, name: string) => buttonOf(root, name).click();

  it('has the facts and the actors, which change in place', async () => {
    const actors = [{ name: 'trainer', cls: 'Trainer', endpoint: 'step', since: 0, waiting: 2, calls: 7, failures: 1 }];
    const { details, change } = shown(
      aRank(0, { rss: 1.4e9, cpu: 97.4, pid: 4001, actors, gpu_memory: { '1': 61e9 } })
    );
    const facts = () => Object.fromEntries(texts(details, 'dt').map((name, at) => [name, texts(details, 'dd')[at]]));
    expect(facts()).toMatchObject({
      Runs: 'nothing',
      Memory: '1.4 GB · GPU 1: 61.0 GB',
      Processor: '97 %',
      Process: '4001',
      Host: 'name-of-h1'
    });
    expect(texts(details, 'tbody td')).toEqual(['trainer', 'step', '2', '7', '1']);
    const row = find(details, 'tbody tr');
    await change({ '0': { doing: 'cell [7]', actors: [{ ...actors[0], waiting: 0 }] } });
    expect(facts()['Runs']).toBe('cell [7]');
    expect(texts(details, 'tbody td')).toEqual(['trainer', 'step', '0', '7', '1']);
    expect(find(details, 'tbody tr')).toBe(row);
  });

  it('asks for the stack when it is wanted, and shows the frame that runs first', async () => {
    const { details, actions } = shown(aRank(0));
    expect(actions.asked).toHaveLength(0);
    tab(details, 'Stack');
    expect(actions.last()).toMatchObject({ what: 'stack', mesh: 'u1', ranks: [0] });
    expect(details.textContent).toContain('Asking rank 0');
    const frames = [
      { function: 'train', file: 'cell [7]', line: 20, text: 'self.step()' },
      { function: 'step', file: 'model.py', line: 3 }
    ];
    actions.last().answer({ stacks: [{ ranks: [0], frames, note: 'waits in all_reduce' }] });
    await settled();
    expect(texts(details, '.mk-Stack-function')).toEqual(['step', 'train']);
    expect(details.textContent).toContain('cell [7]:20');
    expect(details.textContent).toContain('waits in all_reduce');
    tab(details, 'Ask again');
    expect(actions.asked).toHaveLength(2);
  });

  it('says why it could not be asked, and what to do', async () => {
    const { details, actions } = shown(aRank(0));
    tab(details, 'Variables');
    expect(actions.last()).toMatchObject({ what: 'variables', options: { frame: 0 } });
    actions.last().refuse(new RequestError({ message: 'rank 0 does not answer', hint: 'interrupt it' }));
    await settled();
    expect(find(details, '[role=alert]').textContent).toContain('rank 0 does not answer');
    expect(find(details, '[role=alert]').textContent).toContain('interrupt it');
  });

  it('leaves a late answer alone', async () => {
    const { details, actions } = shown(aRank(0));
    tab(details, 'Variables');
    const late = actions.last();
    tab(details, 'Overview');
    late.answer({ frame: null, variables: [{ name: 'x', type: 'int', text: '1' }] });
    await settled();
    expect(details.textContent).not.toContain('int');
    expect(texts(details, 'dt')).toContain('Memory');
  });

  it('kills after asking once more, and says what came of it', async () => {
    const { details, actions } = shown(aRank(0, { state: 'running' }));
    tab(details, 'Kill');
    expect(actions.asked).toHaveLength(0);
    expect(document.activeElement?.textContent).toBe('Keep');
    // It stands where the pointer is; what kills does not.
    expect(texts(details, '.mk-Details-deeds button')).toEqual(['Debug', 'Interrupt', 'Keep', 'Kill', 'Heal']);
    tab(details, 'Keep');
    expect(document.activeElement?.textContent).toBe('Kill');
    tab(details, 'Kill');
    tab(details, 'Kill');
    expect(actions.last()).toMatchObject({ what: 'kill', mesh: 'u1', ranks: [0] });
    actions.last().answer({ text: 'killed rank 0 of m' });
    await settled();
    expect(find(details, '.mk-Details-result').textContent).toBe('killed rank 0 of m');
    tab(details, 'Interrupt');
    actions.last().refuse(new RequestError({ message: 'rank 0 is dead', hint: 'heal it' }));
    await settled();
    expect(find(details, '.mk-Details-result[data-failed]').textContent).toBe('rank 0 is dead heal it');
  });

  it('says that a rank will stop until it has', async () => {
    const { details, actions, change } = shown(aRank(0, { state: 'running' }));
    tab(details, 'Debug');
    actions.last().answer({ text: '0 will stop at the next line of user code.' });
    await settled();
    expect(find(details, '.mk-Details-result').textContent).toContain('will stop');
    await change({ '0': { state: 'stopped' } });
    expect(find(details, '.mk-Details-result').textContent).toBe('');
    expect(texts(details, '.mk-Details-deeds button')[0]).toBe('Debug');
  });

  it('cancels a stop that has not come', async () => {
    const { details, actions } = shown(aRank(0, { state: 'running' }));
    tab(details, 'Debug');
    actions.last().answer({ text: 'Rank 0 will stop at the next line of user code.' });
    await settled();
    tab(details, 'Do not stop');
    expect(actions.last()).toMatchObject({ what: 'undebug', mesh: 'u1', ranks: [0] });
    actions.last().answer({ text: 'Rank 0 will not stop.' });
    await settled();
    expect(find(details, '.mk-Details-result').textContent).toBe('Rank 0 will not stop.');
    expect(texts(details, '.mk-Details-deeds button')[0]).toBe('Debug');
    tab(details, 'Debug');
    expect(actions.last()).toMatchObject({ what: 'debug', ranks: [0] });
  });

  it('offers what makes sense', async () => {
    const { details, change } = shown(aRank(0));
    const enabled = () => texts(details, '.mk-Details-deeds button:not(:disabled)');
    expect(enabled()).toEqual(['Debug', 'Kill']);
    await change({ '0': { state: 'running' } });
    expect(enabled()).toEqual(['Debug', 'Interrupt', 'Kill']);
    await change({ '0': { state: 'dead', cause: SIGKILL } });
    expect(enabled()).toEqual(['Heal']);
    expect(find(details, '.mk-Details-cause').textContent).toBe(SIGKILL);
  });

  it('closes by its button and by Escape, and is silent then', () => {
    const { details, board: made, actions } = shown(aRank(0));
    tab(details, 'Log');
    expect(actions.followed).toHaveLength(1);
    find(details, '.mk-Details-close').dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }));
    expect(details.hidden).toBe(true);
    expect(actions.ended).toBe(1);
    const card = find(made.node, '.mk-Card');
    made.select(0);
    find(details, '.mk-Details-close').focus();
    find(details, '.mk-Details-close').click();
    expect(details.hidden).toBe(true);
    expect(document.activeElement).toBe(card);
    made.select(0);
    card.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }));
    expect(details.hidden).toBe(true);
  });
});
