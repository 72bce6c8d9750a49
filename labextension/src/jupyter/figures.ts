import { Panel, Widget } from '@lumino/widgets';
import { element } from '../views/dom';
import type { OutputModel, OutputRenderer, OutputRenderers } from './outputview';

/** What marks a figure of ranks; the kernel says the same name. */
export const FIGURE_MIME = 'application/vnd.monarch-kernel.figure+json';
const IMAGES = ['image/svg+xml', 'image/png', 'image/jpeg', 'image/gif', 'image/bmp'];

/** A figure in the output of a cell, under the ranks that show it; the style sheet has several stand side by side. */
export class RankFigure extends Panel implements OutputRenderer {
  private readonly _caption = element('div', 'mk-RankFigure-ranks');
  private _image: OutputRenderer | null = null;
  private _mime = '';

  constructor(private readonly _renderers: OutputRenderers) {
    super();
    this.addClass('mk-RankFigure');
    this.addWidget(new Widget({ node: this._caption }));
  }

  async renderModel(model: OutputModel): Promise<void> {
    const { ranks } = (model.data[FIGURE_MIME] ?? {}) as { ranks?: unknown };
    this._caption.textContent = typeof ranks === 'string' ? ranks : '';
    // Pictures that are programs, too, are shown where the notebook is trusted.
    const mime = IMAGES.find(each => each in model.data && (model.trusted || each !== 'image/svg+xml')) ?? 'text/plain';
    if (mime !== this._mime || !this._image) {
      this._image?.dispose();
      this._mime = mime;
      this._image = this._renderers.createRenderer(mime);
      this.addWidget(this._image);
    }
    await this._image.renderModel(model);
  }
}
