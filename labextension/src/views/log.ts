import type { Actions, LogLine, RequestError } from '../model';
import { LogBuffer, parseRanks, t, tn } from '../model';
import { button, Disposables, element, FrameTask, observeSize, setAttribute, setText } from './dom';
import { Theme } from './theme';

/** The height of a line, as in `views.css` (CSS pixels). */
const LINE = 18;
/** Lines above and below those in view. */
const MARGIN = 10;
/** Lines that are asked for at the start. */
const TAIL = 1_000;

/** Which logs a view shows. */
export interface LogOptions {
  readonly mesh: string;
  /** Of these ranks; none named: of all. */
  readonly ranks?: readonly number[];
  /** Lines that are kept. */
  readonly limit?: number;
}

/** Have the browser save a text. */
function download(name: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type: 'text/plain;charset=utf-8' }));
  element('a', '', { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}

/** The logs of ranks as they come: searched, by rank, of any length. Only the lines in view are in the page. */
export class LogView {
  readonly node = element('div', 'mk-View mk-Log');
  readonly buffer: LogBuffer;
  private readonly _search: HTMLInputElement;
  private readonly _ranks: HTMLInputElement;
  private readonly _follow: HTMLButtonElement;
  private readonly _count = element('span', 'mk-Log-count');
  private readonly _scroll = element('div', 'mk-Log-scroll', { tabindex: 0, role: 'log', 'aria-live': 'off' });
  private readonly _space = element('div', 'mk-Log-space');
  private readonly _lines: HTMLElement[] = [];
  private readonly _disposables = new Disposables();
  private readonly _frame = new FrameTask(() => this._draw());
  private readonly _theme: Theme;
  private _following = true;
  private _disposed = false;

  constructor(host: HTMLElement, actions: Actions, options: LogOptions) {
    this.buffer = new LogBuffer(options.limit);
    this._search = element('input', 'mk-Input', { type: 'search', placeholder: t('Search') });
    this._search.setAttribute('aria-label', t('Search in the log'));
    this._ranks = element('input', 'mk-Input mk-Log-ranks', { placeholder: t('Ranks') });
    this._ranks.setAttribute('aria-label', t('Only of these ranks, as 0-3, 7'));
    this._ranks.hidden = options.ranks?.length === 1;
    this._follow = button('mk-Button', t('Follow'), () => this._setFollowing(!this._following));
    const clear = button('mk-Button', t('Clear'), () => {
      this.buffer.clear();
      this._changed();
    });
    clear.hidden = this._ranks.hidden;
    const save = button('mk-Button', t('Save'), () => download(`${options.mesh}.log`, this.buffer.text()), {
      title: t('Save the lines that are shown here in a file')
    });
    this._scroll.setAttribute('aria-label', t('Log'));
    this._scroll.append(this._space);
    this.node.append(
      element('div', 'mk-Log-bar', {}, this._search, this._ranks, this._count, this._follow, clear, save),
      this._scroll
    );
    host.append(this.node);
    this._theme = new Theme(this.node, () => undefined);
    this._disposables.listen(this._search, 'input', () => this._refilter());
    this._disposables.listen(this._ranks, 'input', () => this._refilter());
    this._disposables.listen(this._scroll, 'scroll', () => this._scrolled(), { passive: true });
    this._disposables.add(observeSize(this._scroll, () => this._changed()));
    this._setFollowing(true);
    this._begin(actions, options);
  }

  /** Add lines at the end. */
  append(lines: readonly LogLine[], dropped = 0): void {
    const added: readonly LogLine[] = dropped
      ? [[-1, 'note', tn('%1 line was left out', '%1 lines were left out', dropped)], ...lines]
      : lines;
    const gone = this.buffer.append(added);
    if (gone && !this._following) {
      this._scroll.scrollTop -= gone * LINE; // the lines that are read stay where they are
    }
    this._changed();
  }

  /** Draw anew, as after the view was hidden. */
  update(): void {
    this._changed();
  }

  dispose(): void {
    this._disposed = true;
    this._frame.cancel();
    this._disposables.dispose();
    this._theme.dispose();
    this.node.remove();
  }

  private _begin(actions: Actions, { mesh, ranks = [] }: LogOptions): void {
    // Lines that come while the first ones are under way stand after them.
    let early: [readonly LogLine[], number][] | null = [];
    const flush = () => {
      early?.forEach(([lines, dropped]) => this.append(lines, dropped));
      early = null;
    };
    actions.ask('log', mesh, ranks, { lines: TAIL }).then(
      ({ lines, dropped }) => {
        if (!this._disposed) {
          this.append(lines, dropped);
          flush();
        }
      },
      (error: RequestError) => {
        if (!this._disposed) {
          this._note(error);
          flush();
        }
      }
    );
    this._disposables.add(
      actions.follow(
        mesh,
        ranks,
        '',
        ({ lines, dropped }) => {
          if (early) {
            early.push([lines, dropped]);
          } else {
            this.append(lines, dropped);
          }
        },
        error => this._note(error)
      )
    );
  }

  private _note(error: RequestError): void {
    this.append([[-1, 'note', [error.message, error.hint].filter(Boolean).join(' ')]]);
  }

  private _refilter(): void {
    const text = this._ranks.value.trim();
    const ranks = text ? parseRanks(text) : null;
    setAttribute(this._ranks, 'aria-invalid', text !== '' && ranks === null ? 'true' : undefined);
    this.buffer.filter({ search: this._search.value, ranks: ranks && new Set(ranks) });
    this._changed();
  }

  private _setFollowing(following: boolean): void {
    this._following = following;
    setAttribute(this._follow, 'aria-pressed', String(following));
    this._changed();
  }

  private _scrolled(): void {
    const rest = this._scroll.scrollHeight - this._scroll.scrollTop - this._scroll.clientHeight;
    const atEnd = rest < LINE;
    if (atEnd !== this._following) {
      this._following = atEnd;
      setAttribute(this._follow, 'aria-pressed', String(atEnd));
    }
    this._frame.cancel();
    this._draw();
  }

  private _changed(): void {
    this._frame.request();
  }

  private _draw(): void {
    const { length, total } = this.buffer;
    const height = `${length * LINE}px`;
    if (this._space.style.height !== height) {
      this._space.style.height = height;
    }
    const view = this._scroll.clientHeight;
    if (this._following) {
      this._scroll.scrollTop = Math.max(0, length * LINE - view);
    }
    const shown = length === total ? tn('%1 line', '%1 lines', total) : t('%1 of %2 lines', length, total);
    setText(this._count, shown);
    const first = Math.max(0, Math.floor(this._scroll.scrollTop / LINE) - MARGIN);
    const wanted = Math.min(length - first, Math.ceil(view / LINE) + 2 * MARGIN);
    while (this._lines.length < wanted) {
      const line = element('div', 'mk-Log-line', {}, element('span', 'mk-Log-rank'), element('span', 'mk-Log-text'));
      this._lines.push(line);
      this._space.append(line);
    }
    this._lines.forEach((line, index) => {
      const content = index < wanted ? this.buffer.line(first + index) : undefined;
      line.hidden = !content;
      if (content) {
        this._fill(line, content, first + index);
      }
    });
  }

  private _fill(node: HTMLElement, [rank, stream, text]: LogLine, index: number): void {
    node.style.transform = `translateY(${index * LINE}px)`;
    node.dataset['stream'] = stream;
    const [label, body] = node.children;
    if (label && body) {
      setText(label, rank >= 0 ? String(rank) : '');
      const search = this._search.value.toLowerCase();
      if (!search || stream === 'note') {
        setText(body, text);
      } else {
        body.replaceChildren(...marked(text, search));
      }
    }
  }
}

/** A text with what was searched for marked in it. */
function marked(text: string, search: string): (Node | string)[] {
  const small = text.toLowerCase();
  const parts: (Node | string)[] = [];
  let from = 0;
  for (let at = small.indexOf(search); at >= 0; at = small.indexOf(search, from)) {
    parts.push(text.slice(from, at), element('mark', '', {}, text.slice(at, at + search.length)));
    from = at + search.length;
  }
  parts.push(text.slice(from));
  return parts;
}
