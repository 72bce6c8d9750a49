import type { Dispose } from '../model';
import { button, element, setAttribute, setText } from '../views/dom';
import type { Memory } from './surroundings';

/** What a section shows; made when it opens, and disposed when it closes. */
export interface SectionContent {
  update?(): void;
  dispose: Dispose;
}

/** A part of the panel that opens and closes, and stays as it was over a reload. Nothing in it lives while it is closed. */
export class Section {
  readonly node: HTMLElement;
  private readonly _head: HTMLButtonElement;
  private readonly _count = element('span', 'mk-Section-count');
  private readonly _body: HTMLElement;
  private _content: SectionContent | undefined;

  /**
   * @param id - unique in the panel.
   * @param _make - fills the body.
   */
  constructor(
    host: HTMLElement,
    private readonly _id: string,
    title: string,
    private readonly _memory: Memory,
    private readonly _make: (body: HTMLElement) => SectionContent
  ) {
    this._body = element('div', 'mk-Section-body', { id: `mk-section-${_id}-${counter++}`, hidden: true });
    this._head = button('mk-Section-head', '', () => this.open(!this.isOpen), {
      'aria-expanded': 'false',
      'aria-controls': this._body.id,
      'data-section': _id
    });
    this._head.append(element('span', 'mk-Section-title', {}, title), this._count);
    this.node = element('section', 'mk-Section', { 'aria-label': title }, this._head, this._body);
    host.append(this.node);
    if (_memory.get(`section.${_id}`) === 'open') {
      this.open(true);
    }
  }

  get isOpen(): boolean {
    return !this._body.hidden;
  }

  open(open: boolean): void {
    if (open === this.isOpen) {
      return;
    }
    this._body.hidden = !open;
    setAttribute(this._head, 'aria-expanded', String(open));
    this._memory.set(`section.${this._id}`, open ? 'open' : '');
    if (open) {
      this._content = this._make(this._body);
    } else {
      this._close();
    }
  }

  /** Say how many there are, and whether that is bad news. */
  count(text: string, alarming = false): void {
    setText(this._count, text);
    setAttribute(this._count, 'data-alarm', alarming);
  }

  /** Make the content anew, if it is open: it is about another mesh. */
  renew(): void {
    if (this.isOpen) {
      this._close();
      this._content = this._make(this._body);
    }
  }

  update(): void {
    this._content?.update?.();
  }

  dispose(): void {
    this._close();
    this.node.remove();
  }

  private _close(): void {
    this._content?.dispose();
    this._content = undefined;
    this._body.replaceChildren();
  }
}

let counter = 0;
