import type { MeshStore } from '../model';
import { t, wholeDuration } from '../model';
import { button, element, setText } from './dom';

/** How often times pass, and the least time between two readings that nobody asked for (ms). */
const TICK = 1_000;
const LEAST = 2_000;

export interface ReadingOptions {
  /** What the button says that asks again. */
  readonly again: string;
  /** What is said until the first answer. */
  readonly asking: string;
  ask(): Promise<Node[]>;
  /** What the answer is about: when this differs from when it was asked for, it is asked for again. */
  about(): string;
  /** Why there is no answer. */
  refusal(error: unknown): Node;
}

/** An answer of the kernel, and how old it is. It is read again when what it is about is another, or by its button. */
export class Reading {
  readonly node = element('div', 'mk-Reading');
  private readonly _page = element('div', 'mk-Reading-page');
  private readonly _age = element('span', 'mk-Faint mk-Reading-age');
  private readonly _again: HTMLButtonElement;
  private readonly _timer: ReturnType<typeof setInterval>;
  private _about = '';
  /** When the answer was asked for; 0: there is none. */
  private _read = 0;
  private _asked = 0;
  private _asking = false;
  private _disposed = false;

  constructor(
    host: HTMLElement,
    private readonly _store: MeshStore,
    private readonly _options: ReadingOptions
  ) {
    this._again = button('mk-Button mk-Reading-again', _options.again, () => this.ask());
    this.node.append(this._page, element('div', 'mk-Reading-row', {}, this._again, this._age));
    host.append(this.node);
    this._timer = setInterval(() => this.update(), TICK);
    this.ask();
  }

  /** Whether the answer is about what there is now. */
  get isFresh(): boolean {
    return this._read > 0 && !this._asking && this._about === this._options.about();
  }

  ask(): void {
    if (this._asking) {
      return;
    }
    this._asking = true;
    this._again.disabled = true;
    this._asked = Date.now();
    const about = this._options.about();
    const when = this._store.now();
    if (!this._read) {
      this._page.replaceChildren(element('div', 'mk-Note', {}, this._options.asking));
    }
    const put = (...nodes: Node[]) => {
      this._asking = false;
      if (!this._disposed) {
        this._about = about;
        this._read = when;
        this._again.disabled = false;
        this._page.replaceChildren(...nodes);
        this._tell();
      }
    };
    this._options.ask().then(
      nodes => put(...nodes),
      (error: unknown) => put(this._options.refusal(error))
    );
  }

  /** Take the answer away: another is known to be right. */
  clear(): void {
    this._read = 0;
    this._page.replaceChildren();
    this._tell();
  }

  /** Read again if that is due. */
  update(): void {
    this._tell();
    const due = this._about !== this._options.about() && Date.now() - this._asked >= LEAST;
    if (due && !this.node.closest('[hidden]') && document.visibilityState !== 'hidden') {
      this.ask();
    }
  }

  dispose(): void {
    this._disposed = true;
    clearInterval(this._timer);
    this.node.remove();
  }

  private _tell(): void {
    setText(this._age, this._read ? t('read %1 ago', wholeDuration(this._store.now() - this._read)) : '');
  }
}

/** What ranks do, in a text that differs when that does. */
export function doingsOf(store: MeshStore, mesh: string, ranks: readonly number[] = []): string {
  const all = store.ranks(mesh);
  const some = ranks.length ? ranks.flatMap(rank => all[rank] ?? []) : all;
  return some
    .map(({ proc, pid, state, doing, stop }) =>
      [proc, pid, state, doing, stop?.file, stop?.line, stop?.function].join(' ')
    )
    .join('\n');
}
