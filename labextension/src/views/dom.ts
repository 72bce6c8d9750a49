/** Small tools for the DOM: elements in one call, text that changes only if it differs, work once a frame. */

import type { Dispose } from '../model';

type Attributes = Readonly<Record<string, string | number | boolean | undefined>>;

/** An element with a class, attributes (`true`: present, `false` or undefined: not) and children. */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  name = '',
  attributes: Attributes = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  if (name) {
    made.className = name;
  }
  for (const [key, value] of Object.entries(attributes)) {
    setAttribute(made, key, value);
  }
  made.append(...children);
  return made;
}

/** A button that does something. */
export function button(name: string, label: string, pressed: () => void, attributes: Attributes = {}) {
  const made = element('button', name, { type: 'button', ...attributes }, label);
  made.addEventListener('click', pressed);
  return made;
}

/** Set an attribute, or take it away, if that changes anything. */
export function setAttribute(target: Element, key: string, value: string | number | boolean | undefined): void {
  const wanted = value === false || value === undefined ? null : value === true ? '' : String(value);
  if (target.getAttribute(key) === wanted) {
    return;
  }
  if (wanted === null) {
    target.removeAttribute(key);
  } else {
    target.setAttribute(key, wanted);
  }
}

/** Set the text of an element; nothing is laid out anew if it is the same. */
export function setText(target: Element, text: string): void {
  if (target.textContent !== text) {
    target.textContent = text;
  }
}

/** Set the text, and the same as a tooltip, as it may be cut. */
export function setCutText(target: HTMLElement, text: string): void {
  setText(target, text);
  setAttribute(target, 'title', text || undefined);
}

/** Calls a function at most once in a frame of the page. */
export class FrameTask {
  private _frame = 0;

  constructor(private readonly _run: () => void) {}

  request(): void {
    this._frame ||= requestAnimationFrame(() => {
      this._frame = 0;
      this._run();
    });
  }

  cancel(): void {
    cancelAnimationFrame(this._frame);
    this._frame = 0;
  }
}

/** What is to be undone when a view is disposed. */
export class Disposables {
  private _list: Dispose[] = [];

  add(...dispose: Dispose[]): void {
    this._list.push(...dispose);
  }

  /** Listen until disposed. */
  listen<T extends EventTarget>(
    target: T,
    type: string,
    heard: (event: never) => void,
    options?: AddEventListenerOptions
  ): void {
    const listener = heard as (event: Event) => void;
    target.addEventListener(type, listener, options);
    this._list.push(() => target.removeEventListener(type, listener, options));
  }

  dispose(): void {
    for (const dispose of this._list.reverse()) {
      dispose();
    }
    this._list = [];
  }
}

/** Observe the size of an element, until the result is called; without an observer (old test DOMs) nothing is told. */
export function observeSize(target: Element, changed: () => void): Dispose {
  if (typeof ResizeObserver === 'undefined') {
    return () => undefined;
  }
  const observer = new ResizeObserver(changed);
  observer.observe(target);
  return () => observer.disconnect();
}

/**
 * Arrow keys move among elements, of which one alone is a stop of the tab key.
 *
 * @param items - the elements, in order.
 */
export function moveByArrows(container: HTMLElement, items: () => HTMLElement[], disposables: Disposables): void {
  const stop = (chosen: HTMLElement | undefined) => {
    for (const item of items()) {
      item.tabIndex = item === chosen ? 0 : -1;
    }
  };
  disposables.listen(container, 'focusin', (event: FocusEvent) => {
    const item = items().find(each => each === event.target);
    if (item) {
      stop(item);
    }
  });
  disposables.listen(container, 'keydown', (event: KeyboardEvent) => {
    const all = items();
    const at = all.indexOf(event.target as HTMLElement);
    const from = all[at];
    if (!from) {
      return;
    }
    const target = arrowTarget(event.key, at, all);
    if (target) {
      event.preventDefault();
      event.stopPropagation();
      target.focus();
    }
  });
}

function arrowTarget(key: string, at: number, all: HTMLElement[]): HTMLElement | undefined {
  const from = all[at];
  if (!from) {
    return undefined;
  }
  const here = from.getBoundingClientRect();
  const nearest = (candidates: HTMLElement[]) => {
    const middle = here.left + here.width / 2;
    const rows = candidates.map(item => ({ item, box: item.getBoundingClientRect() }));
    const top = rows[0]?.box.top;
    return rows
      .filter(({ box }) => Math.abs(box.top - (top ?? 0)) < 2)
      .map(({ item, box }) => ({ item, far: Math.abs(box.left + box.width / 2 - middle) }))
      .sort((a, b) => a.far - b.far)[0]?.item;
  };
  switch (key) {
    case 'ArrowRight':
      return all[at + 1];
    case 'ArrowLeft':
      return all[at - 1];
    case 'ArrowDown':
      return nearest(all.slice(at + 1).filter(item => item.getBoundingClientRect().top > here.top + 1));
    case 'ArrowUp':
      return nearest(
        all
          .slice(0, at)
          .reverse()
          .filter(item => item.getBoundingClientRect().top < here.top - 1)
      );
    case 'Home':
      return all[0];
    case 'End':
      return all.at(-1);
    default:
      return undefined;
  }
}
