import { Disposables, element, FrameTask, observeSize, setAttribute } from '../dom';
import type { Place } from '../tooltip';
import type { Box, Layout } from './layout';

/** What a `ScrolledCanvas` shows. */
export interface CanvasContent {
  layout(width: number): Layout;
  /** Draw an item; its box has been cleared. */
  paint(context: CanvasRenderingContext2D, ratio: number, index: number, box: Box): void;
  /** Draw the name of a group. */
  paintLabel(context: CanvasRenderingContext2D, ratio: number, group: number, box: Box): void;
  /** The item in words, for screen readers. */
  describe(index: number): string;
  /** The item was clicked, or chosen by the keyboard. */
  pick(index: number): void;
  /** The pointer or the focus came to an item at a place on the page, or left (-1). */
  point(index: number, place: Place | null): void;
}

/**
 * Thousands of items in a scrolled area: a canvas of the size of the area shows those that are in view, and stays where
 * it is while the area scrolls. Only what changed is drawn again.
 *
 * Keyboard and screen readers meet a button, which the arrow keys move from item to item.
 */
export class ScrolledCanvas {
  readonly node = element('div', 'mk-Cells', { tabindex: -1 });
  private readonly _space = element('div', 'mk-Cells-space', { role: 'group' });
  private readonly _canvas = element('canvas', 'mk-Cells-canvas', { 'aria-hidden': 'true' });
  private readonly _hover = element('div', 'mk-Cells-hover', { hidden: true });
  private readonly _selection = element('div', 'mk-Cells-selection', { hidden: true });
  private _stop: HTMLButtonElement;
  private readonly _context: CanvasRenderingContext2D | null;
  private readonly _disposables = new Disposables();
  private readonly _frame = new FrameTask(() => this._draw());
  private _layout: Layout;
  private _width = 0;
  private _viewHeight = 0;
  private _ratio = 1;
  private _dirty: Set<number> | 'all' = 'all';
  private _active = 0;
  private _selected = -1;
  private _pointed = -1;

  constructor(
    host: HTMLElement,
    label: string,
    private readonly _content: CanvasContent
  ) {
    this._space.setAttribute('aria-label', label);
    this._context = this._canvas.getContext('2d');
    this._stop = this._makeStop();
    this._space.append(this._canvas, this._hover, this._selection, this._stop);
    this.node.append(this._space);
    host.append(this.node);
    this._layout = this._content.layout(1);
    this._listen();
    this.relayout();
  }

  /** The layout, or the width, may be another: place and draw all again. */
  relayout(): void {
    const width = this._space.clientWidth || this.node.clientWidth || 300;
    this._width = width;
    this._layout = this._content.layout(width);
    this._active = Math.min(this._active, Math.max(0, this._layout.count - 1));
    this._space.style.height = `${this._layout.height}px`;
    this._viewHeight = Math.min(this.node.clientHeight || this._layout.height, this._layout.height);
    this._resize();
    this._place();
    this.redraw();
  }

  /** Draw items again that changed; without any, all. */
  redraw(items?: Iterable<number>): void {
    if (!items) {
      this._dirty = 'all';
    } else if (this._dirty !== 'all') {
      for (const item of items) {
        this._dirty.add(item);
      }
    }
    this._frame.request();
  }

  /** Mark an item as the one whose details are shown (-1: none), and scroll to it if it is out of view. */
  select(index: number, scroll = true): void {
    this._selected = index;
    if (index >= 0) {
      this._active = index;
      if (scroll) {
        this._scrollTo(index);
      }
    }
    this._place();
  }

  /** Tell again what is pointed at, as its tooltip may have changed. */
  repoint(): void {
    if (this._pointed >= 0) {
      this._content.point(this._pointed, this._placeOf(this._pointed));
    }
  }

  focus(): void {
    this._stop.focus();
  }

  dispose(): void {
    this._content.point(-1, null);
    this._frame.cancel();
    this._disposables.dispose();
    this.node.remove();
  }

  private _listen(): void {
    const { _disposables: disposables, node } = this;
    disposables.listen(node, 'scroll', () => this._scrolled(), { passive: true });
    disposables.listen(this._space, 'pointermove', (event: PointerEvent) => this._point(this._itemAt(event)));
    disposables.listen(this._space, 'pointerleave', () => this._point(-1));
    disposables.listen(this._space, 'click', (event: MouseEvent) => {
      const item = event.target === this._stop ? this._active : this._itemAt(event);
      if (item >= 0) {
        this._active = item;
        this._place();
        this._content.pick(item);
      }
    });
    disposables.listen(this._space, 'keydown', (event: KeyboardEvent) => this._keyed(event));
    disposables.add(
      observeSize(node, () => {
        const width = this._space.clientWidth;
        const height = Math.min(node.clientHeight, this._layout.height);
        if (width !== this._width || height !== this._viewHeight || ratioNow() !== this._ratio) {
          this.relayout();
        }
      })
    );
    disposables.listen(window, 'resize', () => {
      if (ratioNow() !== this._ratio) {
        this.relayout();
      }
    });
  }

  private _scrolled(): void {
    // Drawn in the same frame as the scroll, so that nothing trails behind.
    this._dirty = 'all';
    this._frame.cancel();
    this._draw();
    this._point(-1);
  }

  private _resize(): void {
    this._ratio = ratioNow();
    const width = Math.round(this._width * this._ratio);
    const height = Math.round(this._viewHeight * this._ratio);
    if (this._canvas.width !== width || this._canvas.height !== height) {
      this._canvas.width = width;
      this._canvas.height = height;
      this._canvas.style.width = `${this._width}px`;
      this._canvas.style.height = `${this._viewHeight}px`;
    }
  }

  private _draw(): void {
    const context = this._context;
    const dirty = this._dirty;
    this._dirty = new Set();
    if (!context || !this._viewHeight) {
      return;
    }
    const top = this.node.scrollTop;
    const bottom = top + this._viewHeight;
    const [first, end] = this._layout.between(top, bottom);
    context.setTransform(this._ratio, 0, 0, this._ratio, 0, -Math.round(top * this._ratio));
    if (dirty === 'all') {
      context.clearRect(0, top, this._width, this._viewHeight + 1);
      this._drawLabels(context, top, bottom);
      for (let index = first; index < end; index++) {
        this._content.paint(context, this._ratio, index, this._layout.box(index));
      }
      return;
    }
    for (const index of dirty) {
      if (index >= first && index < end) {
        const box = this._layout.box(index);
        context.clearRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
        this._content.paint(context, this._ratio, index, box);
      }
    }
  }

  private _drawLabels(context: CanvasRenderingContext2D, top: number, bottom: number): void {
    for (const label of this._layout.labels) {
      if (label.y > bottom) {
        break;
      }
      if (label.y + label.height >= top) {
        this._content.paintLabel(context, this._ratio, label.group, label);
      }
    }
  }

  private _itemAt(event: MouseEvent): number {
    const { left, top } = this._space.getBoundingClientRect();
    return this._layout.at(event.clientX - left, event.clientY - top);
  }

  private _point(index: number): void {
    if (index === this._pointed) {
      return;
    }
    this._pointed = index;
    this._hover.hidden = index < 0;
    if (index >= 0) {
      put(this._hover, this._layout.box(index));
    }
    this._content.point(index, index < 0 ? null : this._placeOf(index));
  }

  private _placeOf(index: number): Place {
    const space = this._space.getBoundingClientRect();
    const { x, y, height } = this._layout.box(index);
    return { left: space.left + x, top: space.top + y, bottom: space.top + y + height };
  }

  private _keyed(event: KeyboardEvent): void {
    if (event.target !== this._stop) {
      return;
    }
    const moves: Record<string, [number, number]> = {
      ArrowRight: [1, 0],
      ArrowLeft: [-1, 0],
      ArrowDown: [0, 1],
      ArrowUp: [0, -1],
      Home: [-this._layout.count, 0],
      End: [this._layout.count, 0]
    };
    const move = moves[event.key];
    if (!move) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    const ends = event.key === 'Home' ? 0 : event.key === 'End' ? this._layout.count - 1 : undefined;
    this._active = ends ?? this._layout.move(this._active, ...move);
    this._scrollTo(this._active);
    // A button of its own, so that a screen reader tells of it as of any that gets the focus.
    const stop = this._makeStop();
    const old = this._stop;
    this._stop = stop;
    this._space.append(stop);
    this._place();
    stop.focus({ preventScroll: true });
    old.remove();
  }

  private _makeStop(): HTMLButtonElement {
    const stop = element('button', 'mk-Cells-stop', { type: 'button' });
    stop.addEventListener('focus', () => {
      setAttribute(stop, 'aria-label', this._content.describe(this._active));
      if (stop.matches(':focus-visible')) {
        this._point(this._active);
      }
    });
    stop.addEventListener('blur', () => this._point(-1));
    return stop;
  }

  /** Put the button and the mark of the selection where their items are. */
  private _place(): void {
    if (this._layout.count) {
      put(this._stop, this._layout.box(this._active));
      setAttribute(this._stop, 'aria-label', this._content.describe(this._active));
    }
    this._stop.hidden = !this._layout.count;
    const shown = this._selected >= 0 && this._selected < this._layout.count;
    this._selection.hidden = !shown;
    if (shown) {
      put(this._selection, this._layout.box(this._selected));
    }
  }

  private _scrollTo(index: number): void {
    const { y, height } = this._layout.box(index);
    const { scrollTop } = this.node;
    if (y < scrollTop + 4) {
      this.node.scrollTop = Math.max(0, y - 24);
    } else if (y + height > scrollTop + this._viewHeight - 4) {
      this.node.scrollTop = y + height - this._viewHeight + 24;
    }
  }
}

function put(target: HTMLElement, box: Box): void {
  target.style.transform = `translate(${box.x}px, ${box.y}px)`;
  target.style.width = `${box.width}px`;
  target.style.height = `${box.height}px`;
}

function ratioNow(): number {
  return window.devicePixelRatio || 1;
}
