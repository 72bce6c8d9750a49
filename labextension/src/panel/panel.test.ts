import { beforeEach, describe, expect, it, vi } from 'vitest';
import type { Actions, JobView, RankView } from '../model';
import { completeJob, completeRank, FeedClient, jobText, MeshStore, RequestError } from '../model';
import { settled } from '../testing';
import { ActionBar } from './actionbar';
import { summarizeActors } from './actorsection';
import { groupStops } from './debugsection';
import { JobList } from './joblist';
import { JobSection } from './jobsection';
import { KernelPane } from './kernelpane';
import { KeptSection } from './keptsection';
import { Section } from './section';
import type { KeptMesh, Memory, Surroundings } from './surroundings';

function ranks(count: number, fields: Partial<RankView>[] = []): RankView[] {
  return Array.from({ length: count }, (_, rank) => completeRank({ mesh: 'k', rank, state: 'idle', ...fields[rank] }));
}

function storeOf(views: RankView[], mesh = {}): MeshStore {
  const store = new MeshStore();
  const meshes = [{ key: 'k', name: 'm', ...mesh }];
  store.apply({ kind: 'snapshot', version: 1, time: 0, meshes, hosts: [], ranks: { k: views }, failures: [] });
  return store;
}

class Remembered implements Memory {
  readonly values = new Map<string, string>();
  get = (key: string) => this.values.get(key);
  set = (key: string, value: string) => void this.values.set(key, value);
}

function surroundingsOf(changes: Partial<Surroundings> = {}) {
  return {
    insertCode: vi.fn(async () => undefined),
    runCode: vi.fn(async () => undefined),
    confirm: vi.fn(async () => true),
    focusRank: vi.fn(async () => undefined),
    kept: { watch: () => () => undefined, stop: async () => undefined },
    memory: new Remembered(),
    ...changes
  };
}

function actionsOf() {
  return {
    ask: vi.fn(async (_what: string, _mesh: string, _ranks: readonly number[], options: object = {}) => ({
      code: `%mesh ${JSON.stringify(options)}`
    })),
    perform: vi.fn(async (what: string) => ({ text: `did ${what}` })),
    follow: vi.fn(() => () => undefined),
    plot: vi.fn(() => () => undefined)
  };
}

const button = (node: HTMLElement, deed: string) => {
  const found = node.querySelector<HTMLButtonElement>(`[data-deed="${deed}"]`);
  if (!found) throw new Error(`no button ${deed}`);
  return found;
};

let host: HTMLElement;

beforeEach(() => {
  host = document.createElement('div');
  document.body.replaceChildren(host);
});

describe('the buttons of a mesh', () => {
  function bar(store: MeshStore, surroundings: Surroundings = surroundingsOf()) {
    const actions = actionsOf();
    const made = new ActionBar(host, store, actions as unknown as Actions, surroundings);
    made.update('k');
    return { made, actions };
  }

  it('heals the dead ranks, and only where there are some', async () => {
    const { made, actions } = bar(storeOf(ranks(3)));
    expect(button(made.node, 'heal').getAttribute('aria-disabled')).toBe('true');
    await made.perform('heal');
    expect(actions.perform).not.toHaveBeenCalled();

    const second = bar(storeOf(ranks(4, [{}, { state: 'dead' }, {}, { state: 'dead' }])));
    expect(button(second.made.node, 'heal').hasAttribute('data-urgent')).toBe(true);
    await second.made.perform('heal');
    expect(second.actions.perform).toHaveBeenCalledWith('heal', 'k', [1, 3]);
    expect(second.made.node.querySelector('[role=status]')?.textContent).toBe('did heal');
  });

  it('inserts the code that the kernel gives, and does nothing, while that is asked for', async () => {
    const surroundings = surroundingsOf();
    const { made, actions } = bar(storeOf(ranks(2)), surroundings);
    made.node.querySelector<HTMLButtonElement>('.mk-Bar-code')?.click();
    expect(surroundings.memory.get('asCode')).toBe('yes');
    await made.perform('down');
    expect(actions.ask).toHaveBeenCalledWith('code', 'k', [], { action: 'down' });
    expect(surroundings.insertCode).toHaveBeenCalledWith('%mesh {"action":"down"}');
    expect(actions.perform).not.toHaveBeenCalled();
    expect(surroundings.confirm).not.toHaveBeenCalled();
  });

  it('interrupts whatever runs, also at a breakpoint', () => {
    const refusal = (fields: Partial<RankView>) =>
      button(bar(storeOf(ranks(2, [{}, fields]))).made.node, 'interrupt').getAttribute('aria-disabled');
    expect(refusal({})).toBe('true');
    expect(refusal({ state: 'running', doing: 'cell [3]' })).toBe(null);
    expect(refusal({ state: 'stopped', doing: 'cell [3]' })).toBe(null);
    expect(refusal({ state: 'unresponsive' })).toBe(null);
    expect(refusal({ state: 'dead' })).toBe('true');
  });

  it('stops a mesh only if the person agrees', async () => {
    const { made, actions } = bar(storeOf(ranks(2)), surroundingsOf({ confirm: async () => false }));
    await made.perform('down');
    await made.perform('restart');
    expect(actions.perform).not.toHaveBeenCalled();
  });

  it('says what a restart costs, and that something runs', async () => {
    const surroundings = surroundingsOf({ confirm: vi.fn(async () => true) });
    const { made, actions } = bar(storeOf(ranks(2, [{ state: 'running' }])), surroundings);
    await made.perform('restart');
    const [question, consequence, deed] = vi.mocked(surroundings.confirm).mock.calls[0] ?? [];
    expect(question).toMatch(/^Restart the mesh /);
    expect(consequence).toBe('A cell or an endpoint runs on it. Its processes end, and their variables are lost.');
    expect(deed).toBe('Restart');
    expect(actions.perform).toHaveBeenCalledWith('restart', 'k', []);
  });

  it('does one thing at a time, and says why it failed', async () => {
    const { made, actions } = bar(storeOf(ranks(2)));
    let fail: (error: Error) => void = () => undefined;
    actions.perform.mockReturnValueOnce(new Promise((_, reject) => (fail = reject)));
    const done = made.perform('sync');
    expect(button(made.node, 'use').getAttribute('aria-disabled')).toBe('true');
    await made.perform('use');
    expect(actions.perform).toHaveBeenCalledTimes(1);
    fail(new RequestError({ message: 'the host is full.', hint: 'Free some space.' }));
    await done;
    expect(made.node.querySelector('[role=status]')?.textContent).toBe('the host is full. Free some space.');
    expect(button(made.node, 'use').hasAttribute('aria-disabled')).toBe(false);
  });
});

describe('jobs', () => {
  const waiting = completeJob({
    key: 'abc',
    engine: 'slurm',
    mesh: 'm',
    hosts: 4,
    up: 1,
    reason: 'Resources',
    since: 40,
    expected_start: 160
  });

  it('say in the words of the engine what they wait for, since when, and until when', () => {
    expect(jobText(waiting, 100)).toBe('1 of 4 hosts up · Resources · for 1 min 0 s · expected in 1 min 0 s');
    expect(jobText(completeJob({ hosts: 1, up: 1, since: 40, ends_at: 130 }), 100)).toBe(
      '1 of 1 host up · walltime ends in 30 s'
    );
    expect(jobText(completeJob({ ended: true, hosts: 2, reason: 'exit 1' }), 100)).toBe('ended · exit 1');
    expect(jobText(completeJob({ error: 'squeue does not answer' }), 100)).toBe('squeue does not answer');
  });

  it('are ended only if the person agrees, and say what becomes of it', async () => {
    const refusing = surroundingsOf({ confirm: vi.fn(async () => false) });
    const actions = actionsOf();
    const press = async (list: JobList) => {
      list.update([waiting]);
      button(list.node, 'kill_job').click();
      await new Promise(resolve => setTimeout(resolve));
    };
    await press(new JobList(host, 'Jobs', actions as unknown as Actions, refusing, () => 100));
    expect(refusing.confirm).toHaveBeenCalledWith(
      'End job abc of slurm?',
      'It is for mesh m. Its hosts are given back, and what runs on them ends.',
      'End job'
    );
    expect(actions.perform).not.toHaveBeenCalled();
    const list = new JobList(host, 'Jobs', actions as unknown as Actions, surroundingsOf(), () => 100);
    await press(list);
    expect(actions.perform).toHaveBeenCalledWith('kill_job', '', [], { job: 'abc' });
    list.update([]);
    expect(list.node.hidden).toBe(false);
    expect(list.node.querySelector('[role=status]')?.textContent).toBe('did kill_job');
  });

  it('are in the store as long as they are waited for', () => {
    const store = storeOf(ranks(1));
    const changes = { kind: 'changes' as const, time: 1 };
    store.apply({ ...changes, base: 1, version: 2, jobs: [{ key: 'abc', engine: 'slurm', hosts: 4 }] });
    expect([...store.jobs.values()].map(({ key, up }) => [key, up])).toEqual([['abc', 0]]);
    store.apply({ ...changes, base: 2, version: 3, gone: { jobs: ['abc'] } });
    expect(store.jobs.size).toBe(0);
  });

  it('are above the meshes while they are waited for, also while there is no mesh', async () => {
    const asked: { what?: unknown }[] = [];
    const client = new FeedClient(message => void asked.push(message as object));
    const pane = new KernelPane(host, client, surroundingsOf(), 'kernel');
    pane.setVisible(true);
    const jobs = [{ key: 'abc', engine: 'slurm', mesh: 'm', hosts: 4, up: 1, reason: 'Resources' }];
    client.receive({ kind: 'snapshot', version: 1, time: 0, meshes: [], hosts: [], ranks: {}, failures: [], jobs });
    await settled();
    const shown = () => host.querySelector<HTMLElement>('.mk-Pane > .mk-Jobs');
    expect(shown()?.hidden).toBe(false);
    expect(shown()?.textContent).toContain('m · slurm · abc');
    expect(shown()?.textContent).toContain('1 of 4 hosts up · Resources');
    host.querySelector<HTMLButtonElement>('[data-section=jobs]')?.click();
    expect(asked.map(({ what }) => what)).toContain('jobs');
    client.receive({ kind: 'changes', base: 1, version: 2, time: 1, gone: { jobs: ['abc'] } });
    await settled();
    expect(shown()?.hidden).toBe(true);
    pane.dispose();
    client.dispose();
  });

  it('of the whole list are asked for, with what engines cannot tell', async () => {
    const sent: Partial<JobView>[] = [{ key: 'x1', engine: 'ssh', hosts: 1, up: 1, used_by: 'process 7' }];
    const actions = { ...actionsOf(), ask: vi.fn(async () => ({ jobs: sent, notes: ['ray cannot be asked'] })) };
    const section = new JobSection(host, actions as unknown as Actions, surroundingsOf(), () => 100);
    await new Promise(resolve => setTimeout(resolve));
    expect(host.querySelector('[data-job=x1]')?.textContent).toContain('1 of 1 host up');
    expect(host.textContent).toContain('ray cannot be asked');
    section.dispose();
    expect(host.childElementCount).toBe(0);
  });
});

describe('stops', () => {
  it('are grouped by place and error', () => {
    const stop = { reason: 'breakpoint', file: 'cell [3]', line: 2, function: 'work', text: '' };
    const error = { ...stop, reason: 'exception', text: 'ValueError: x' };
    const views = ranks(4, [
      { state: 'stopped', stop },
      { state: 'running' },
      { state: 'stopped', stop: error },
      { state: 'stopped', stop }
    ]);
    expect(groupStops(views).map(({ title, text, ranks: of }) => [title, text, of])).toEqual([
      ['breakpoint · cell [3], line 2 · work', '', [0, 3]],
      ['exception · cell [3], line 2 · work', 'ValueError: x', [2]]
    ]);
  });
});

describe('actors', () => {
  it('are put together from their ranks', () => {
    const actor = { name: 'trainer', cls: 'Trainer', since: 0, waiting: 1, calls: 5, failures: 0 };
    const views = ranks(3, [
      { actors: [{ ...actor, endpoint: 'step' }] },
      { actors: [{ ...actor, endpoint: 'step' }] },
      { actors: [{ ...actor, endpoint: '', failures: 2 }] }
    ]);
    expect(summarizeActors(views)).toEqual([
      {
        name: 'trainer',
        cls: 'Trainer',
        ranks: [0, 1, 2],
        running: [['step', 2]],
        waiting: 3,
        calls: 15,
        failures: 2
      }
    ]);
  });
});

describe('a section', () => {
  it('has content only while it is open, and opens again after a reload', () => {
    const memory = new Remembered();
    const dispose = vi.fn();
    const make = vi.fn((body: HTMLElement) => {
      body.append('content');
      return { dispose };
    });
    const section = new Section(host, 'log', 'Log', memory, make);
    expect(make).not.toHaveBeenCalled();
    const head = section.node.querySelector<HTMLButtonElement>('button');
    head?.click();
    expect(make).toHaveBeenCalledTimes(1);
    expect(head?.getAttribute('aria-expanded')).toBe('true');
    new Section(host, 'log', 'Log', memory, make);
    expect(make).toHaveBeenCalledTimes(2);
    head?.click();
    expect(dispose).toHaveBeenCalledTimes(1);
    expect(section.node.textContent).toBe('Log');
    new Section(host, 'log', 'Log', memory, make);
    expect(make).toHaveBeenCalledTimes(2);
  });
});

describe('kept meshes', () => {
  const mesh: KeptMesh = { name: 'kept', host: 'a', held_by: 0, meshes: [{ name: 'm', ranks: 4, alive: 3 }] };

  it('are not shown where the server does not say which there are', () => {
    const section = new KeptSection(host, async () => null, surroundingsOf());
    section.setVisible(true);
    expect(section.node.hidden).toBe(true);
  });

  it('are listed while in view, and attached by code where there is no kernel to do it', async () => {
    const unwatch = vi.fn();
    const watch = (changed: (meshes: KeptMesh[]) => void) => {
      changed([mesh]);
      return unwatch;
    };
    const surroundings = surroundingsOf({ kept: { watch, stop: async () => undefined } });
    const section = new KeptSection(host, async () => null, surroundings);
    section.setVisible(true);
    expect(section.node.hidden).toBe(false);
    expect(section.node.textContent).toContain('free · 4 ranks · 1 dead · on a');
    section.setVisible(false);
    expect(unwatch).toHaveBeenCalledTimes(1);
    section.node.querySelector<HTMLButtonElement>('[aria-label="Attach kept"]')?.click();
    await vi.waitFor(() => expect(surroundings.insertCode).toHaveBeenCalledWith('%mesh attach kept'));
  });

  it('are attached by a kernel that answers only after the click', async () => {
    const watch = (changed: (meshes: KeptMesh[]) => void) => {
      changed([mesh]);
      return () => undefined;
    };
    const surroundings = surroundingsOf({ kept: { watch, stop: async () => undefined } });
    const perform = vi.fn(async () => ({ text: 'kept is attached' }));
    let answer: (actions: Actions) => void = () => undefined;
    const section = new KeptSection(host, () => new Promise(resolve => (answer = resolve)), surroundings);
    section.setVisible(true);
    section.node.querySelector<HTMLButtonElement>('[aria-label="Attach kept"]')?.click();
    expect(section.node.textContent).toContain('Waiting for the kernel');
    expect(perform).not.toHaveBeenCalled();
    answer({ perform } as unknown as Actions);
    await vi.waitFor(() => expect(section.node.textContent).toContain('kept is attached'));
    expect(perform).toHaveBeenCalledWith('attach', '', [], { name: 'kept' });
    expect(surroundings.insertCode).not.toHaveBeenCalled();
  });
});
