/** The colours of the page: which theme it has, told when it changes, and read for canvases. */

import type { RankState } from '../model';
import { STATES } from '../model';
import { Disposables } from './dom';

/** The colours and fonts that canvases draw with. */
export interface Palette {
  readonly states: Readonly<Record<RankState, string>>;
  /** On a filled box. */
  readonly on: string;
  readonly text: string;
  readonly faint: string;
  readonly line: string;
  readonly track: string;
  readonly surface: string;
  readonly lines: readonly string[];
  readonly font: string;
}

/** How many colours for lines `views.css` has. */
const LINE_COLOURS = 8;

/**
 * Keeps `data-mk-theme` ("light" or "dark") on the root of a view, from the colour that is behind it: so it is right in
 * any front end, whatever it calls its themes.
 */
export class Theme {
  private _palette: Palette | undefined;
  private readonly _disposables = new Disposables();

  constructor(
    private readonly _root: HTMLElement,
    private readonly _changed: () => void
  ) {
    this._look();
    const check = () => this._look();
    if (typeof MutationObserver !== 'undefined') {
      const observer = new MutationObserver(check);
      for (const target of [document.documentElement, document.body]) {
        observer.observe(target, {
          attributeFilter: ['class', 'style', 'data-theme', 'data-jp-theme-name', 'data-vscode-theme-kind']
        });
      }
      this._disposables.add(() => observer.disconnect());
    }
    if (typeof matchMedia !== 'undefined') {
      for (const query of ['(prefers-color-scheme: dark)', '(prefers-contrast: more)', '(forced-colors: active)']) {
        this._disposables.listen(matchMedia(query), 'change', check);
      }
    }
  }

  /** The colours now. */
  get palette(): Palette {
    this._palette ??= readPalette(this._root);
    return this._palette;
  }

  /** Look at the page again, as when the view has been put into it. */
  refresh(): void {
    this._look();
  }

  dispose(): void {
    this._disposables.dispose();
  }

  private _look(): void {
    this._root.dataset['mkTheme'] = isDark(this._root) ? 'dark' : 'light';
    this._palette = undefined;
    this._changed();
  }
}

/** Whether what is behind an element is dark. */
function isDark(element: Element): boolean {
  for (let at: Element | null = element.parentElement; at; at = at.parentElement) {
    const colour =
      getComputedStyle(at)
        .backgroundColor.match(/[\d.]+/g)
        ?.map(Number) ?? [];
    const [red = 0, green = 0, blue = 0, alpha = 1] = colour;
    if (colour.length >= 3 && alpha > 0.5) {
      return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 128;
    }
  }
  return typeof matchMedia !== 'undefined' && matchMedia('(prefers-color-scheme: dark)').matches;
}

function readPalette(root: HTMLElement): Palette {
  const style = getComputedStyle(root);
  const read = (name: string) => style.getPropertyValue(`--mk-${name}`).trim() || '#888';
  return {
    states: Object.fromEntries(STATES.map(state => [state, read(state)])) as Record<RankState, string>,
    on: read('on'),
    text: read('text'),
    faint: read('faint'),
    line: read('line'),
    track: read('track'),
    surface: read('surface'),
    lines: Array.from({ length: LINE_COLOURS }, (_, index) => read(`line-${index + 1}`)),
    font: style.fontFamily || 'sans-serif'
  };
}
