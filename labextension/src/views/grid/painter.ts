/** Draws ranks and hosts on canvases. */

import type { Counts, RankView } from '../../model';
import { STATES, isTrouble, stateName } from '../../model';
import { GLYPHS, OLDER_CORNER } from '../glyphs';
import type { Palette } from '../theme';
import type { Box } from './layout';

/** Cells from this size on have the number of a rank that is well in them. */
const NUMBERED_FROM = 20;

/** How much of its colour a box has that is not solid; `views.css` has the same for icons. */
export const FILLS = { tint: 0.3, outline: 0.08 } as const;

/** Draws with the colours of one palette, at one ratio of device pixels; keeps the pictures of cells that it drew. */
export class Painter {
  private readonly _sprites = new Map<string, HTMLCanvasElement>();
  private readonly _cut = new Map<string, string>();

  constructor(
    private readonly _context: CanvasRenderingContext2D,
    private readonly _palette: Palette,
    private readonly _ratio: number
  ) {}

  /** Whether it draws for this ratio. */
  fits(ratio: number): boolean {
    return ratio === this._ratio;
  }

  /** The cell of a rank. */
  rank(view: RankView, box: Box): void {
    const numbered = box.width >= NUMBERED_FROM && (view.state === 'idle' || view.state === 'running');
    const sprite = this._sprite(view.state, view.older, box.width, !numbered);
    this._context.drawImage(sprite, box.x, box.y, box.width, box.height);
    if (numbered) {
      const context = this._context;
      context.fillStyle = this._palette.text;
      context.font = `${view.rank > 99 ? 9 : 11}px ${this._palette.font}`;
      context.textAlign = 'center';
      context.textBaseline = 'middle';
      context.fillText(String(view.rank), box.x + box.width / 2, box.y + box.height / 2 + 0.5);
    }
  }

  /** The name of a host. */
  label(text: string, box: Box, faint = true): void {
    const context = this._context;
    context.fillStyle = faint ? this._palette.faint : this._palette.text;
    context.font = `12px ${this._palette.font}`;
    context.textAlign = 'left';
    context.textBaseline = 'middle';
    context.fillText(this._fit(text, box.width), box.x, box.y + box.height / 2 + 0.5);
  }

  /** The tile of a host: its name, a bar of its ranks by state, the worst first, and the worst news in words. */
  host(name: string, counts: Counts, box: Box): void {
    const context = this._context;
    const { states, track } = this._palette;
    const nameWidth = Math.round(box.width * 0.34);
    const newsWidth = 92;
    this.label(name, { ...box, width: nameWidth - 8 }, false);
    const x = box.x + nameWidth;
    const width = box.width - nameWidth - newsWidth;
    const y = box.y + 7;
    const height = box.height - 14;
    context.fillStyle = track;
    context.fillRect(x, y, width, height);
    let from = 0;
    for (const state of STATES) {
      const share = (counts.states[state] / counts.total) * width;
      if (share > 0) {
        // One dead rank of many is still seen.
        const shown = Math.min(width - from, Math.max(isTrouble(state) ? 3 : 0, share));
        if (state === 'idle' || state === 'ended') {
          context.strokeStyle = states[state];
          context.lineWidth = 1;
          context.strokeRect(x + from + 0.5, y + 0.5, Math.max(0, shown - 1), height - 1);
        } else {
          context.fillStyle = states[state];
          context.globalAlpha = isTrouble(state) ? 1 : 0.55;
          context.fillRect(x + from, y, shown, height);
          context.globalAlpha = 1;
        }
        from += shown;
      }
    }
    const worst = STATES.find(state => counts.states[state] > 0);
    if (worst) {
      const size = 14;
      const left = box.x + box.width - newsWidth + 8;
      context.drawImage(this._sprite(worst, false, size, true), left, box.y + (box.height - size) / 2, size, size);
      const news = { x: left + size + 5, y: box.y, width: newsWidth - size - 13, height: box.height };
      this.label(`${counts.states[worst]} ${stateName(worst)}`, news, !isTrouble(worst));
    }
  }

  private _sprite(state: RankView['state'], older: boolean, size: number, glyph: boolean): HTMLCanvasElement {
    const key = `${state} ${older} ${size} ${glyph}`;
    const known = this._sprites.get(key);
    if (known) {
      return known;
    }
    const sprite = document.createElement('canvas');
    sprite.width = sprite.height = Math.round(size * this._ratio);
    const context = sprite.getContext('2d');
    if (context) {
      context.scale(sprite.width / 16, sprite.height / 16);
      this._draw(context, state, older, glyph, 16 / size);
    }
    this._sprites.set(key, sprite);
    return sprite;
  }

  /** A state in a box of 16 x 16, where `pixel` is the size of a CSS pixel. */
  private _draw(
    context: CanvasRenderingContext2D,
    state: RankView['state'],
    older: boolean,
    glyph: boolean,
    pixel: number
  ): void {
    const { box, path } = GLYPHS[state];
    const colour = this._palette.states[state];
    context.fillStyle = context.strokeStyle = colour;
    context.lineWidth = pixel;
    const edge = pixel / 2;
    if (box !== 'none') {
      context.beginPath();
      context.roundRect(edge, edge, 16 - pixel, 16 - pixel, 2.5);
      if (box === 'solid') {
        context.fill();
      } else if (box === 'dotted') {
        context.setLineDash([2 * pixel, 2 * pixel]);
      } else {
        context.globalAlpha = FILLS[box];
        context.fill();
        context.globalAlpha = 1;
      }
      context.stroke();
    }
    if (path && glyph) {
      context.fillStyle = box === 'solid' ? this._palette.on : colour;
      context.fill(new Path2D(path));
    }
    if (older) {
      const corner = new Path2D(OLDER_CORNER);
      context.setLineDash([]);
      context.fillStyle = this._palette.text;
      context.strokeStyle = this._palette.surface;
      context.fill(corner);
      context.stroke(corner);
    }
  }

  private _fit(text: string, width: number): string {
    const key = `${width} ${text}`;
    const known = this._cut.get(key);
    if (known !== undefined) {
      return known;
    }
    let shown = text;
    if (this._context.measureText(text).width > width) {
      // The end of a host's name tells it from others, so the middle is left out.
      let kept = text.length - 1;
      do {
        kept--;
        const head = Math.ceil(kept / 2);
        shown = `${text.slice(0, head)}…${text.slice(text.length - (kept - head))}`;
      } while (kept > 2 && this._context.measureText(shown).width > width);
    }
    this._cut.set(key, shown);
    return shown;
  }
}
