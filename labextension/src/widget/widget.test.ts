import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import type { FrontEndMessage, KernelMessage } from '../model';
import { aRank, aSnapshot, completeDom, find } from '../testing';
import widget from '.';

/** The model of a widget, whose comm several views share. */
class SharedModel {
  readonly sent: FrontEndMessage[] = [];
  readonly listeners = new Set<(content: KernelMessage) => void>();

  constructor(private readonly _traits: Record<string, unknown>) {}

  get = (name: string) => this._traits[name];
  send = (content: unknown) => void this.sent.push(content as FrontEndMessage);
  on = (_name: string, heard: (content: KernelMessage) => void) => void this.listeners.add(heard);
  off = (_name: string, heard: (content: KernelMessage) => void) => void this.listeners.delete(heard);

  tell(content: KernelMessage): void {
    this.listeners.forEach(listener => listener(content));
  }

  kinds(): string[] {
    return this.sent.map(message => message.kind);
  }
}

/** Observers of the page, which a test calls. */
const observers = new Set<(seen: boolean) => void>();

class PageObserver {
  private readonly _tell: (seen: boolean) => void;
  constructor(told: (entries: { isIntersecting: boolean }[]) => void) {
    this._tell = seen => told([{ isIntersecting: seen }]);
  }
  observe(): void {
    observers.add(this._tell);
  }
  disconnect(): void {
    observers.delete(this._tell);
  }
}

function see(seen: boolean): void {
  observers.forEach(tell => tell(seen));
}

beforeEach(() => {
  completeDom();
  vi.useFakeTimers();
  vi.stubGlobal('IntersectionObserver', PageObserver);
});

afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
  document.body.replaceChildren();
});

describe('the widget', () => {
  it('asks for changes while it is seen, and shows them', () => {
    const model = new SharedModel({ view: 'mesh', mesh: 'u1', ranks: [] });
    const end = widget.render({ model, el: document.body });
    expect(model.kinds()).toEqual([]);
    see(true);
    vi.advanceTimersByTime(3_000);
    expect(model.kinds()).toEqual(['lease', 'lease']);
    model.tell(aSnapshot([aRank(0), aRank(1, { state: 'dead', cause: 'why' })]));
    vi.advanceTimersByTime(20);
    expect(find(document.body, '.mk-News-news').textContent).toBe('1 dead: why');
    see(false);
    vi.advanceTimersByTime(60_000);
    expect(model.kinds()).toHaveLength(2);
    end();
  });

  it('is quiet while its tab of the browser is hidden', () => {
    const model = new SharedModel({ view: 'mesh', mesh: '' });
    const end = widget.render({ model, el: document.body });
    see(true);
    const hidden = vi.spyOn(document, 'visibilityState', 'get').mockReturnValue('hidden');
    document.dispatchEvent(new Event('visibilitychange'));
    vi.advanceTimersByTime(60_000);
    expect(model.kinds()).toEqual(['lease']);
    hidden.mockReturnValue('visible');
    document.dispatchEvent(new Event('visibilitychange'));
    expect(model.kinds()).toEqual(['lease', 'lease']);
    end();
  });

  it('has views of one model that all are right, each for as long as it is there', async () => {
    const model = new SharedModel({ view: 'mesh', mesh: 'u1' });
    const [first, second] = [document.createElement('div'), document.createElement('div')];
    document.body.append(first, second);
    const endFirst = widget.render({ model, el: first });
    see(true);
    model.tell(aSnapshot([aRank(0)], 5));
    const endSecond = widget.render({ model, el: second });
    see(true);
    // The kernel has sent the second view nothing, and does not know of it: the answer to its lease tells it so.
    model.tell({ kind: 'alive', time: 1, version: 5 });
    expect(model.kinds().filter(kind => kind === 'again')).toHaveLength(1);
    model.tell(aSnapshot([aRank(0)], 5));
    model.tell({ kind: 'changes', base: 5, version: 6, time: 1, ranks: { u1: { '0': { state: 'running' } } } });
    vi.advanceTimersByTime(20);
    for (const view of [first, second]) {
      expect(find(view, '.mk-Card-state').textContent).toBe('running');
    }
    endFirst();
    expect(first.children).toHaveLength(0);
    model.tell({ kind: 'changes', base: 6, version: 7, time: 1, ranks: { u1: { '0': { state: 'idle' } } } });
    vi.advanceTimersByTime(20);
    expect(find(second, '.mk-Card-state').textContent).toBe('idle');
    endSecond();
  });

  it('says that the kernel has gone when it is silent, and shows the last state', () => {
    const model = new SharedModel({ view: 'mesh', mesh: '' });
    const end = widget.render({ model, el: document.body });
    see(true);
    model.tell(aSnapshot([aRank(0)]));
    vi.advanceTimersByTime(13_000);
    expect(find(document.body, '.mk-Banner').textContent).toContain('The kernel has gone');
    expect(find(document.body, '.mk-Card-state').textContent).toBe('idle');
    model.tell({ kind: 'alive', time: 1, version: 1 });
    expect(find(document.body, '.mk-Banner').hidden).toBe(true);
    end();
  });

  it('plots an expression', () => {
    const model = new SharedModel({ view: 'plot', mesh: 'u1', ranks: [0, 1], expression: 'loss', period: 0.5 });
    const end = widget.render({ model, el: document.body });
    expect(model.sent[0]).toMatchObject({ kind: 'plot', mesh: 'u1', ranks: [0, 1], expression: 'loss', period: 0.5 });
    const { id } = model.sent[0] as { id: string };
    model.tell({ kind: 'points', id, time: 1, values: [[0, 2]] });
    expect(find(document.body, '.mk-Chart-news').textContent).toBe('median 2');
    end();
    expect(model.kinds()).toEqual(['plot', 'unplot']);
  });

  it('leaves nothing behind', () => {
    const model = new SharedModel({ view: 'mesh', mesh: '' });
    const end = widget.render({ model, el: document.body });
    see(true);
    model.tell(aSnapshot([aRank(0)]));
    end();
    expect(document.body.children).toHaveLength(0);
    expect(model.listeners.size).toBe(0);
    expect(observers.size).toBe(0);
    const { length } = model.sent;
    vi.advanceTimersByTime(60_000);
    document.dispatchEvent(new Event('visibilitychange'));
    expect(model.sent).toHaveLength(length);
  });
});
