"use strict";(self.rspackChunkmonarch_kernel_lab=self.rspackChunkmonarch_kernel_lab||[]).push([[1],{24(e,a,t){var i=t(22),o=t.n(i),r=t(23),n=(t.n(r))()(o());n.push([e.id,`/* Views of a mesh. Colours follow JupyterLab's variables, then VS Code's, then the colour behind the view, which
   data-mk-theme tells. Sizes do not depend on the numbers that change. */

.mk-View {
  --mk-text: var(--jp-content-font-color1, var(--vscode-foreground, #1f2328));
  --mk-faint: var(--jp-content-font-color2, var(--vscode-descriptionForeground, #59636e));
  --mk-surface: var(--jp-layout-color1, var(--vscode-editor-background, #ffffff));
  --mk-raised: var(--jp-layout-color2, var(--vscode-editorWidget-background, #f3f4f6));
  --mk-line: var(--jp-border-color2, var(--vscode-panel-border, #d8dee4));
  --mk-track: var(--jp-border-color3, #eaeef2);
  --mk-focus: var(--jp-brand-color1, var(--vscode-focusBorder, #0969da));
  --mk-mark: #ffe58a;
  --mk-on: #ffffff;
  --mk-dead: #cf222e;
  --mk-unresponsive: #8250df;
  --mk-stopped: #9a6700;
  --mk-healing: #0f7b6c;
  --mk-starting: #59636e;
  --mk-running: #1f6feb;
  --mk-idle: #8c959f;
  --mk-ended: #8c959f;
  --mk-line-1: #1f6feb;
  --mk-line-2: #d9730d;
  --mk-line-3: #0f7b6c;
  --mk-line-4: #c2388f;
  --mk-line-5: #6e5bd6;
  --mk-line-6: #8a6d00;
  --mk-line-7: #0b86a8;
  --mk-line-8: #59636e;
  --mk-same: rgb(128 128 128 / 18%);
  --mk-within: rgb(43 127 217 / 30%);
  --mk-mild: #f0c64a;
  --mk-much: #e98b45;
  --mk-most: #cf222e;
  --mk-most-on: #ffffff;
  --mk-mild-on: #1f2328;
  --mk-mono: var(--jp-code-font-family, ui-monospace, SFMono-Regular, Menlo, Consolas, monospace);

  position: relative;
  box-sizing: border-box;
  color: var(--mk-text);
  font-family: var(--jp-ui-font-family, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif);
  font-size: var(--jp-ui-font-size1, 13px);
  line-height: 1.4;
  font-variant-numeric: tabular-nums;
}

.mk-View[data-mk-theme='dark'] {
  --mk-text: var(--jp-content-font-color1, var(--vscode-foreground, #e6edf3));
  --mk-faint: var(--jp-content-font-color2, var(--vscode-descriptionForeground, #9aa4af));
  --mk-surface: var(--jp-layout-color1, var(--vscode-editor-background, #0f1216));
  --mk-raised: var(--jp-layout-color2, var(--vscode-editorWidget-background, #1c2128));
  --mk-line: var(--jp-border-color2, var(--vscode-panel-border, #363d46));
  --mk-track: var(--jp-border-color3, #262c34);
  --mk-focus: var(--jp-brand-color1, var(--vscode-focusBorder, #4493f8));
  --mk-mark: #7a5d00;
  --mk-on: #0b0e12;
  --mk-dead: #ff6a69;
  --mk-unresponsive: #b18cff;
  --mk-stopped: #e3a21a;
  --mk-healing: #3cc9b4;
  --mk-starting: #9aa4af;
  --mk-running: #5aa2ff;
  --mk-idle: #7d8792;
  --mk-ended: #7d8792;
  --mk-line-1: #5aa2ff;
  --mk-line-2: #ff9a4d;
  --mk-line-3: #3cc9b4;
  --mk-line-4: #f778ba;
  --mk-line-5: #a898ff;
  --mk-line-6: #d7b64a;
  --mk-line-7: #4cc9ec;
  --mk-line-8: #9aa4af;
  --mk-mild: #d7b64a;
  --mk-much: #f0884a;
  --mk-most: #ff6a69;
  --mk-most-on: #0b0e12;
  --mk-mild-on: #0b0e12;
}

@media (prefers-contrast: more) {
  .mk-View,
  .mk-View[data-mk-theme='dark'] {
    --mk-faint: var(--mk-text);
    --mk-line: var(--mk-text);
    --mk-idle: var(--mk-text);
    --mk-ended: var(--mk-text);
    --mk-starting: var(--mk-text);
  }
}

[data-jp-theme-name*='High Contrast'] .mk-View {
  --mk-faint: var(--mk-text);
  --mk-line: var(--mk-text);
  --mk-idle: var(--mk-text);
  --mk-ended: var(--mk-text);
  --mk-starting: var(--mk-text);
}

@media (forced-colors: active) {
  .mk-View,
  .mk-View[data-mk-theme='dark'] {
    --mk-text: CanvasText;
    --mk-faint: CanvasText;
    --mk-surface: Canvas;
    --mk-raised: Canvas;
    --mk-line: CanvasText;
    --mk-track: Canvas;
    --mk-focus: Highlight;
    --mk-on: Canvas;
    --mk-dead: CanvasText;
    --mk-unresponsive: CanvasText;
    --mk-stopped: CanvasText;
    --mk-healing: CanvasText;
    --mk-starting: CanvasText;
    --mk-running: Highlight;
    --mk-idle: GrayText;
    --mk-ended: GrayText;
  }

  .mk-View .mk-Icon,
  .mk-View .mk-Meter {
    forced-color-adjust: none;
  }

  .mk-View .mk-Button[aria-pressed='true'],
  .mk-View .mk-Tab[aria-selected='true'] {
    background: Highlight;
    color: HighlightText;
    forced-color-adjust: none;
  }
}

.mk-View *,
.mk-View *::before {
  box-sizing: border-box;
}

.mk-View [hidden] {
  display: none !important;
}

.mk-View button,
.mk-View input {
  margin: 0;
  font: inherit;
  color: inherit;
}

.mk-View button {
  border: 0;
  padding: 0;
  background: none;
  text-align: start;
  cursor: pointer;
}

.mk-View button:disabled {
  cursor: default;
}

.mk-View :focus-visible {
  outline: 2px solid var(--mk-focus);
  outline-offset: 1px;
}

.mk-Spoken {
  position: absolute;
  width: 1px;
  height: 1px;
  overflow: hidden;
  clip-path: inset(50%);
  white-space: nowrap;
}

/* ---- parts that are used in several places */

.mk-View .mk-Button {
  flex: none;
  min-height: 24px;
  padding: 1px 8px;
  border: 1px solid var(--mk-line);
  border-radius: 4px;
  background: var(--mk-surface);
  white-space: nowrap;
}

.mk-View .mk-Button:hover:not(:disabled) {
  background: var(--mk-raised);
}

.mk-View .mk-Button:disabled {
  opacity: 0.45;
}

.mk-View .mk-Button[aria-pressed='true'] {
  border-color: var(--mk-focus);
  box-shadow: inset 0 0 0 1px var(--mk-focus);
}

.mk-View .mk-Input {
  min-width: 0;
  height: 24px;
  padding: 1px 6px;
  border: 1px solid var(--mk-line);
  border-radius: 4px;
  background: var(--mk-surface);
}

.mk-View .mk-Input[aria-invalid] {
  border-color: var(--mk-dead);
}

.mk-Icon {
  flex: none;
  width: 14px;
  height: 14px;
  color: var(--mk-state);
}

.mk-View [data-state='dead'] {
  --mk-state: var(--mk-dead);
}

.mk-View [data-state='unresponsive'],
.mk-View [data-state='hang'],
.mk-View [data-state='walltime'] {
  --mk-state: var(--mk-unresponsive);
}

.mk-View [data-state='stopped'] {
  --mk-state: var(--mk-stopped);
}

.mk-View [data-state='healing'] {
  --mk-state: var(--mk-healing);
}

.mk-View [data-state='starting'] {
  --mk-state: var(--mk-starting);
}

.mk-View [data-state='running'] {
  --mk-state: var(--mk-running);
}

.mk-View [data-state='idle'] {
  --mk-state: var(--mk-idle);
}

.mk-View [data-state='ended'] {
  --mk-state: var(--mk-ended);
}

.mk-Icon-box {
  fill: currentColor;
}

.mk-Icon-box.mk-mod-tint {
  fill-opacity: 0.3;
  stroke: currentColor;
  stroke-width: 1.4;
}

.mk-Icon-box.mk-mod-outline {
  fill-opacity: 0.08;
  stroke: currentColor;
  stroke-width: 1.4;
}

.mk-Icon-box.mk-mod-dotted {
  fill: none;
  stroke: currentColor;
  stroke-width: 1.4;
  stroke-dasharray: 2.2 2.2;
}

.mk-Icon-on {
  fill: var(--mk-on);
}

.mk-Icon-mark {
  fill: currentColor;
}

.mk-Icon-older {
  fill: var(--mk-text);
  stroke: var(--mk-surface);
}

.mk-Note,
.mk-Faint {
  color: var(--mk-faint);
}

.mk-Code,
.mk-Place {
  font-family: var(--mk-mono);
  font-size: 12px;
}

.mk-Place {
  padding: 2px 0 4px;
  color: var(--mk-faint);
  overflow-wrap: anywhere;
}

.mk-Refusal {
  padding: 6px 8px;
  border-inline-start: 3px solid var(--mk-dead);
  background: var(--mk-raised);
  overflow-wrap: anywhere;
}

.mk-Tabs {
  display: flex;
  gap: 2px;
  overflow-x: auto;
  scrollbar-width: none;
  border-bottom: 1px solid var(--mk-line);
}

.mk-View .mk-Tab {
  flex: none;
  min-height: 28px;
  padding: 3px 10px;
  border-bottom: 2px solid transparent;
  color: var(--mk-faint);
}

.mk-View .mk-Tab:hover {
  color: var(--mk-text);
}

.mk-View .mk-Tab[aria-selected='true'] {
  border-bottom-color: var(--mk-focus);
  color: var(--mk-text);
}

.mk-View .mk-Tab:focus-visible {
  outline-offset: -2px;
}

.mk-View .mk-Table {
  width: 100%;
  margin: 0;
  border: 0;
  border-collapse: collapse;
  table-layout: fixed;
  font-size: inherit;
}

.mk-View .mk-Table tr {
  border: 0;
  background: none;
}

.mk-View .mk-Table th,
.mk-View .mk-Table td {
  max-width: none;
  padding: 3px 8px 3px 0;
  border: 0;
  border-bottom: 1px solid var(--mk-line);
  overflow: hidden;
  text-align: start;
  text-overflow: ellipsis;
  vertical-align: top;
  white-space: nowrap;
  font-weight: normal;
}

.mk-View .mk-Table thead th {
  color: var(--mk-faint);
}

.mk-View .mk-Variables th {
  width: 28%;
}

.mk-View .mk-Variables td:nth-child(2) {
  width: 20%;
}

.mk-View .mk-Table .mk-mod-number {
  width: 58px;
  padding-right: 0;
  text-align: end;
}

/* ---- the board */

.mk-Board {
  display: flex;
  flex-direction: column;
  gap: 8px;
  min-width: 160px;
  padding: 4px 2px;
}

.mk-Board[data-gone] .mk-Board-content,
.mk-Board[data-ended] .mk-Board-content {
  opacity: 0.5;
}

.mk-Banner {
  display: flex;
  gap: 6px;
  align-items: center;
  padding: 4px 8px;
  border-inline-start: 3px solid var(--mk-faint);
  background: var(--mk-raised);
}

.mk-Board-content {
  display: flex;
  flex-direction: column;
  gap: 8px;
  min-width: 0;
}

.mk-Board-bar {
  display: flex;
  flex-wrap: wrap;
  gap: 8px;
  align-items: center;
  justify-content: space-between;
}

.mk-Board-main {
  display: flex;
  flex-direction: column;
  gap: 12px;
  min-width: 0;
}

.mk-Board[data-wide] .mk-Board-main {
  flex-direction: row;
}

.mk-Board-main > .mk-Grid {
  flex: 1 1 0;
  min-width: 0;
}

.mk-Board[data-wide] .mk-Details {
  flex: 0 0 min(380px, 45%);
}

.mk-Modes {
  display: flex;
  flex: none;
}

.mk-View .mk-Modes .mk-Button:first-child {
  border-radius: 4px 0 0 4px;
}

.mk-View .mk-Modes .mk-Button:last-child {
  margin-inline-start: -1px;
  border-radius: 0 4px 4px 0;
}

/* ---- news */

.mk-News {
  min-width: 0;
}

.mk-News-headline {
  display: flex;
  gap: 8px;
  align-items: baseline;
  min-width: 0;
  font-size: 15px;
  white-space: nowrap;
}

.mk-News-name {
  flex: 0 1 auto;
  min-width: 2ch;
  max-width: 40%;
  overflow: hidden;
  font-weight: 600;
  text-overflow: ellipsis;
}

.mk-News-count {
  flex: none;
  color: var(--mk-faint);
}

.mk-News-news {
  flex: 1 1 0;
  min-width: 0;
  overflow: hidden;
  text-overflow: ellipsis;
}

.mk-News-headline[data-state='dead'] .mk-News-news,
.mk-News-headline[data-state='unresponsive'] .mk-News-news,
.mk-News-headline[data-state='hang'] .mk-News-news,
.mk-News-headline[data-state='walltime'] .mk-News-news,
.mk-News-headline[data-state='stopped'] .mk-News-news,
.mk-News-headline[data-state='healing'] .mk-News-news {
  color: var(--mk-state);
  font-weight: 600;
}

.mk-News-strip {
  display: flex;
  gap: 8px;
  align-items: center;
  height: 30px;
  margin-top: 4px;
}

.mk-View .mk-News-worst {
  display: flex;
  flex: 1 1 0;
  gap: 6px;
  align-items: center;
  height: 28px;
  min-width: 0;
  padding: 0 8px;
  border-inline-start: 3px solid transparent;
  border-radius: 2px;
}

.mk-View .mk-News-worst:disabled {
  padding-inline-start: 0;
  border: 0;
  color: var(--mk-faint);
}

.mk-View .mk-News-worst[data-state] {
  padding-inline-start: 8px;
  border-inline-start: 3px solid var(--mk-state);
  background: var(--mk-raised);
  color: var(--mk-text);
}

.mk-News-icon:empty {
  display: none;
}

.mk-News-icon {
  display: flex;
}

.mk-News-text {
  min-width: 0;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-View .mk-News-more {
  min-width: 64px;
  text-align: center;
}

.mk-View .mk-News-more[data-empty] {
  visibility: hidden;
}

.mk-News-list {
  max-height: 156px;
  margin: 4px 0 0;
  padding: 0;
  overflow-y: auto;
  list-style: none;
}

.mk-View .mk-News-line {
  display: flex;
  gap: 6px;
  align-items: center;
  width: 100%;
  min-height: 24px;
  padding: 0 8px;
}

.mk-View .mk-News-line:hover {
  background: var(--mk-raised);
}

.mk-View .mk-News-line:focus-visible {
  outline-offset: -2px;
}

.mk-View .mk-News-line:not([data-state]) {
  color: var(--mk-faint);
}

/* ---- legend */

.mk-Legend {
  display: flex;
  flex: 1 1 0;
  flex-wrap: wrap;
  gap: 2px 4px;
  min-width: 0;
}

.mk-View .mk-Legend-chip {
  display: flex;
  gap: 5px;
  align-items: center;
  min-height: 24px;
  padding: 0 6px 0 2px;
  border-radius: 4px;
}

.mk-View .mk-Legend-chip:hover {
  background: var(--mk-raised);
}

.mk-Legend-count {
  min-width: var(--mk-digits, 1ch);
}

.mk-Legend-name {
  min-width: 0;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Board:not([data-wide]) .mk-Legend-count {
  min-width: 0;
}

.mk-Board:not([data-wide]) .mk-Legend {
  display: grid;
  flex-basis: 100%;
  grid-template-columns: repeat(auto-fill, minmax(min(126px, 100%), 1fr));
}

.mk-Board[data-wide] .mk-News-news:not(:empty)::before {
  content: '\xb7 ';
  color: var(--mk-faint);
  font-weight: normal;
}

.mk-Board:not([data-wide]) .mk-News-headline {
  flex-wrap: wrap;
  gap: 0 8px;
}

.mk-Board:not([data-wide]) .mk-News-news {
  flex-basis: 100%;
  min-height: 1.4em;
}

.mk-Board:not([data-wide]) .mk-News-strip,
.mk-Board:not([data-wide]) .mk-News-worst {
  height: 44px;
}

.mk-Board:not([data-wide]) .mk-News-worst .mk-News-text {
  display: -webkit-box;
  line-height: 1.3;
  white-space: normal;
  -webkit-box-orient: vertical;
  -webkit-line-clamp: 2;
}

.mk-Board:not([data-wide]) .mk-Tab {
  padding-inline: 5px;
}

.mk-View .mk-Legend-chip[data-none] {
  opacity: 0.45;
}

.mk-View .mk-Legend-chip[data-trouble] {
  font-weight: 600;
}

/* ---- grid */

.mk-Grid-path {
  display: none;
  gap: 8px;
  align-items: center;
  margin-bottom: 6px;
}

.mk-Grid[data-zoomed='true'] .mk-Grid-path {
  display: flex;
}

.mk-Grid-place {
  overflow: hidden;
  font-weight: 600;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-View .mk-Grid-back::before {
  content: '‹ ';
}

.mk-Cells {
  max-height: var(--mk-grid-height, 420px);
  padding: 2px;
  overflow: hidden auto;
  overscroll-behavior: auto;
  scrollbar-gutter: stable;
  contain: content;
}

.mk-Cells:focus {
  outline: none;
}

.mk-Cells-space {
  position: relative;
  cursor: pointer;
}

.mk-Cells-canvas {
  position: sticky;
  top: 0;
  display: block;
  pointer-events: none;
}

.mk-Cells-hover,
.mk-Cells-selection,
.mk-View .mk-Cells-stop {
  position: absolute;
  top: 0;
  left: 0;
  border-radius: 4px;
  pointer-events: none;
}

.mk-Cells-hover {
  box-shadow: 0 0 0 1px var(--mk-faint);
}

.mk-Cells-selection {
  box-shadow:
    0 0 0 1px var(--mk-surface),
    0 0 0 3px var(--mk-focus);
}

.mk-Cards {
  display: grid;
  grid-template-columns: repeat(auto-fill, minmax(128px, 1fr));
  gap: 6px;
  padding: 2px;
}

.mk-Board[data-wide]:not([data-details]) .mk-Cards {
  grid-template-columns: repeat(auto-fill, minmax(190px, 1fr));
}

.mk-Cards-host {
  grid-column: 1 / -1;
  min-width: 0;
  overflow: hidden;
  color: var(--mk-faint);
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Cards-host:not(:first-child) {
  margin-top: 4px;
}

.mk-View .mk-Card {
  display: flex;
  flex-direction: column;
  gap: 1px;
  height: 68px;
  min-width: 0;
  padding: 5px 8px;
  border: 1px solid var(--mk-line);
  border-radius: 5px;
  background: var(--mk-surface);
}

.mk-View .mk-Card:hover {
  border-color: var(--mk-faint);
}

.mk-View .mk-Card[data-state='dead'],
.mk-View .mk-Card[data-state='unresponsive'],
.mk-View .mk-Card[data-state='stopped'],
.mk-View .mk-Card[data-state='healing'] {
  border-color: var(--mk-state);
  box-shadow: inset 3px 0 0 var(--mk-state);
}

.mk-View .mk-Card[aria-pressed='true'] {
  outline: 2px solid var(--mk-focus);
  outline-offset: 1px;
}

.mk-Card-head {
  display: flex;
  gap: 6px;
  align-items: center;
  min-width: 0;
}

.mk-Card-rank {
  font-weight: 600;
}

.mk-Card-state,
.mk-Card-facts {
  color: var(--mk-faint);
}

.mk-Card-doing {
  display: flex;
  gap: 1ch;
  justify-content: space-between;
}

.mk-Card-time {
  flex: none;
  color: var(--mk-faint);
}

/* Why a rank is in trouble has the room of the facts, too. */
.mk-View .mk-Card[data-reason] .mk-Card-doing {
  display: block;
  height: 2.8em;
  white-space: normal;
}

.mk-Card[data-reason] .mk-Card-what {
  display: -webkit-box;
  white-space: normal;
  -webkit-box-orient: vertical;
  -webkit-line-clamp: 2;
}

.mk-Card[data-reason] .mk-Card-facts {
  display: none;
}

.mk-Card-state,
.mk-Card-what,
.mk-Card-doing,
.mk-Card-facts {
  min-width: 0;
  min-height: 1.4em;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Card-doing,
.mk-Card-facts {
  font-size: 12px;
}

/* ---- tooltip */

.mk-Tooltip {
  position: absolute;
  z-index: 20;
  top: 0;
  left: 0;
  max-width: min(360px, calc(100% - 8px));
  padding: 6px 9px;
  border: 1px solid var(--mk-line);
  border-radius: 5px;
  background: var(--mk-raised);
  box-shadow: 0 4px 14px rgb(0 0 0 / 22%);
  font-size: 12px;
  overflow-wrap: anywhere;
  pointer-events: none;
}

.mk-Tooltip-head {
  display: flex;
  gap: 6px;
  align-items: center;
}

.mk-Tooltip-title {
  font-weight: 600;
}

.mk-Tooltip-facts {
  color: var(--mk-faint);
}

/* ---- details */

.mk-Details,
.mk-Comparison-details {
  display: flex;
  flex-direction: column;
  gap: 6px;
  min-width: 0;
  padding: 8px 10px;
  border: 1px solid var(--mk-line);
  border-radius: 5px;
}

.mk-Details-head {
  display: flex;
  gap: 8px;
  align-items: center;
  min-width: 0;
}

.mk-Details-icon {
  display: flex;
}

.mk-Details-title {
  flex: 1;
  min-width: 0;
  overflow: hidden;
  font-weight: 600;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-View .mk-Details-close {
  min-width: 24px;
  padding: 0;
  border-color: transparent;
  text-align: center;
}

.mk-Details-cause {
  min-height: 1.4em;
  overflow: hidden;
  color: var(--mk-state);
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Details-deeds {
  display: flex;
  flex-wrap: wrap;
  gap: 4px;
  align-items: center;
  min-height: 26px;
}

.mk-Details-question {
  flex: 1;
}

.mk-View .mk-Button[data-sure],
.mk-View .mk-Button[data-sure]:hover:not(:disabled) {
  border-color: var(--mk-dead);
  background: var(--mk-dead);
  color: var(--mk-on);
}

.mk-View .mk-Button[data-sure]:hover:not(:disabled) {
  text-decoration: underline;
}

.mk-Details-result {
  display: -webkit-box;
  min-height: 2.8em;
  overflow: hidden;
  color: var(--mk-faint);
  overflow-wrap: anywhere;
  -webkit-box-orient: vertical;
  -webkit-line-clamp: 2;
}

.mk-Details-result:empty {
  display: none;
}

.mk-Details-result[data-failed] {
  color: var(--mk-dead);
}

.mk-Details-page {
  height: 320px;
  overflow: auto;
}

.mk-Details-page[data-tab='log'] {
  overflow: hidden;
}

.mk-Reading-row {
  display: flex;
  align-items: center;
  gap: 8px;
  margin-top: 6px;
}

.mk-Record {
  margin: 6px 0 0;
  text-align: left;
  overflow-x: auto;
}

.mk-Facts {
  display: grid;
  grid-template-columns: minmax(76px, max-content) minmax(0, 1fr);
  gap: 2px 12px;
  margin: 0 0 8px;
}

.mk-Facts dt {
  color: var(--mk-faint);
  font-weight: normal;
}

.mk-Facts dd {
  min-width: 0;
  margin: 0;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Stack {
  margin: 0 0 8px;
  padding: 0;
  list-style: none;
}

.mk-Stack li {
  padding: 3px 0;
  border-bottom: 1px solid var(--mk-line);
  font-family: var(--mk-mono);
  font-size: 12px;
  overflow-wrap: anywhere;
}

.mk-Stack-function {
  margin-inline-end: 1ch;
  font-weight: 600;
}

.mk-Stack-place {
  color: var(--mk-faint);
}

.mk-View .mk-Stack-text {
  display: block;
  padding: 0 0 0 2ch;
  background: none;
  color: inherit;
  font: inherit;
}

/* ---- log */

.mk-Log {
  display: flex;
  flex-direction: column;
  gap: 6px;
  height: 100%;
  min-height: 160px;
}

.mk-Log-bar {
  display: flex;
  flex-wrap: wrap;
  gap: 4px;
  align-items: center;
}

.mk-Log-bar .mk-Input[type='search'] {
  flex: 1 1 90px;
}

.mk-View .mk-Log-ranks {
  width: 72px;
}

.mk-Log-count {
  min-width: 9ch;
  color: var(--mk-faint);
  text-align: end;
  white-space: nowrap;
}

.mk-Log-scroll {
  flex: 1 1 0;
  min-height: 0;
  overflow: auto;
  border: 1px solid var(--mk-line);
  border-radius: 4px;
  contain: strict;
}

.mk-View .mk-Log-scroll:focus-visible {
  outline-offset: -2px;
}

.mk-Log-space {
  position: relative;
}

.mk-Log-line {
  position: absolute;
  top: 0;
  left: 0;
  display: flex;
  min-width: 100%;
  height: 18px;
  font-family: var(--mk-mono);
  font-size: 12px;
  line-height: 18px;
  white-space: pre;
}

.mk-Log-rank {
  position: sticky;
  left: 0;
  flex: none;
  width: 5.5ch;
  padding-inline-end: 1ch;
  background: var(--mk-surface);
  color: var(--mk-faint);
  text-align: end;
  user-select: none;
}

.mk-Log-line[data-stream='stderr'] .mk-Log-rank {
  box-shadow: inset -2px 0 0 var(--mk-dead);
}

.mk-Log-text {
  padding-inline: 1ch;
}

.mk-Log-line[data-stream='note'] .mk-Log-text {
  color: var(--mk-faint);
  font-style: italic;
}

.mk-Log-text mark {
  background: var(--mk-mark);
  color: inherit;
}

/* ---- hosts */

.mk-Hosts {
  overflow: auto;
  max-height: var(--mk-hosts-height, 420px);
}

.mk-Hosts.mk-View .mk-Table {
  min-width: 420px;
}

.mk-Hosts.mk-View .mk-Table thead th {
  position: sticky;
  z-index: 1;
  top: 0;
  background: var(--mk-surface);
}

.mk-Hosts.mk-View th:nth-child(2) {
  width: 72px;
}

.mk-Hosts tr[data-gone] {
  color: var(--mk-dead);
}

.mk-Hosts-icon {
  display: inline-block;
  margin-inline-end: 5px;
  vertical-align: -2px;
}

.mk-Meter {
  display: block;
  height: 4px;
  margin-top: 1px;
  border-radius: 2px;
  background: var(--mk-track);
  overflow: hidden;
}

.mk-Meter-text {
  display: block;
  overflow: hidden;
  text-overflow: ellipsis;
}

.mk-Meter-fill {
  display: block;
  width: 0;
  height: 100%;
  background: var(--mk-running);
}

/* ---- chart */

.mk-Chart {
  min-width: 220px;
  padding: 4px 2px;
}

.mk-Chart-title {
  overflow: hidden;
  font-family: var(--mk-mono);
  font-size: 13px;
  font-weight: 600;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Chart-news {
  height: 1.4em;
  overflow: hidden;
  color: var(--mk-faint);
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Chart-news[data-bad] {
  color: var(--mk-dead);
}

.mk-Chart-area {
  position: relative;
  height: var(--mk-chart-height, 220px);
}

.mk-Chart-canvas {
  position: absolute;
  width: 100%;
  height: 100%;
}

.mk-Chart-said {
  min-height: 1.4em;
  overflow: hidden;
  color: var(--mk-faint);
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Chart[data-gone] .mk-Chart-area {
  opacity: 0.5;
}

.mk-Chart-readout {
  display: -webkit-box;
  height: 2.8em;
  overflow: hidden;
  font-size: 12px;
  -webkit-box-orient: vertical;
  -webkit-line-clamp: 2;
}

/* ---- the grid of a comparison */

.mk-Comparison {
  display: flex;
  flex-direction: column;
  gap: 6px;
  min-width: 200px;
  padding: 4px 2px;
}

.mk-Comparison-verdict {
  font-weight: 600;
  overflow-wrap: anywhere;
}

.mk-Comparison-verdict[data-bad] {
  color: var(--mk-dead);
}

.mk-Comparison-legend {
  display: flex;
  flex-wrap: wrap;
  gap: 2px 12px;
  color: var(--mk-faint);
}

.mk-Comparison-box {
  display: inline-block;
  width: 1.4em;
  height: 1em;
  margin-inline-end: 0.4em;
  vertical-align: -0.1em;
  background: var(--mk-cell);
  forced-color-adjust: none;
}

.mk-View [data-level='same'] {
  --mk-cell: var(--mk-same);
}

.mk-View [data-level='within'] {
  --mk-cell: var(--mk-within);
}

.mk-View [data-level='mild'] {
  --mk-cell: var(--mk-mild);
  --mk-cell-on: var(--mk-mild-on);
}

.mk-View [data-level='much'] {
  --mk-cell: var(--mk-much);
  --mk-cell-on: var(--mk-mild-on);
}

.mk-View [data-level='most'] {
  --mk-cell: var(--mk-most);
  --mk-cell-on: var(--mk-most-on);
}

.mk-Comparison-scroll {
  position: relative;
  max-height: 420px;
  overflow: auto;
}

.mk-View .mk-Comparison-grid,
.mk-View .mk-Comparison-table {
  margin: 0;
  border: 0;
  border-collapse: collapse;
  font: inherit;
}

.mk-View .mk-Comparison-grid th,
.mk-View .mk-Comparison-grid td {
  padding: 1px;
  border: 0;
  background: var(--mk-surface);
  font-weight: normal;
  text-align: center;
}

.mk-View .mk-Comparison-grid thead th {
  position: sticky;
  z-index: 2;
  top: 0;
  color: var(--mk-faint);
}

.mk-View .mk-Comparison-grid tr > th:first-child {
  position: sticky;
  z-index: 1;
  left: 0;
  max-width: 260px;
  padding-inline-end: 8px;
  overflow: hidden;
  font-family: var(--mk-mono);
  font-size: 12px;
  text-align: start;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-View .mk-Comparison-cell {
  display: block;
  width: 100%;
  min-width: 46px;
  height: 24px;
  background: var(--mk-cell);
  color: var(--mk-cell-on, var(--mk-text));
  font-size: 12px;
  text-align: center;
  forced-color-adjust: none;
}

.mk-View .mk-Comparison-cell[data-first] {
  box-shadow:
    inset 0 0 0 3px var(--mk-text),
    inset 0 0 0 4px var(--mk-surface);
  font-weight: 700;
}

.mk-View .mk-Comparison-cell[aria-pressed='true'] {
  outline: 2px solid var(--mk-focus);
  outline-offset: -1px;
}

.mk-Comparison-title {
  flex: 1;
  min-width: 0;
  font-weight: 600;
  overflow-wrap: anywhere;
}

.mk-Comparison-tensors {
  max-height: 320px;
  overflow: auto;
}

.mk-View .mk-Comparison-table th,
.mk-View .mk-Comparison-table td {
  padding: 2px 12px 2px 0;
  border: 0;
  background: none;
  font-weight: normal;
  text-align: start;
  vertical-align: top;
}

.mk-View .mk-Comparison-table th {
  color: var(--mk-faint);
}

.mk-View .mk-Comparison-table tr[data-wrong] td:nth-child(5) {
  color: var(--mk-dead);
  font-weight: 600;
}
`,""]),t.d(a,{},{A:n})},21(e,a,t){var i=t(22),o=t.n(i),r=t(23),n=t.n(r),m=t(24),l=t(25),d=n()(o());d.i(m.A),d.i(l.A),d.push([e.id,`
`,""]),t.d(a,{},{A:d})},25(e,a,t){var i=t(22),o=t.n(i),r=t(23),n=(t.n(r))()(o());n.push([e.id,`/* The side bar of JupyterLab; what is shared with the widget is in views.css. */

.mk-Panel.mk-View {
  display: flex;
  flex-direction: column;
  min-width: 200px !important;
  height: 100%;
  padding: 0 10px 12px;
  overflow: hidden auto;
  background: var(--jp-layout-color1);
  color: var(--mk-text);
}

.mk-Panel-head {
  position: sticky;
  z-index: 1;
  top: 0;
  display: flex;
  gap: 8px;
  align-items: center;
  justify-content: space-between;
  margin: 0 -10px;
  padding: 8px 10px 6px;
  background: var(--jp-layout-color1);
}

.mk-Panel .mk-Panel-title {
  flex: 1 0 60px;
  min-width: 0;
  margin: 0;
  overflow: hidden;
  font-size: inherit;
  font-weight: 600;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Panel-status {
  display: flex;
  flex: 0 1 auto;
  gap: 5px;
  align-items: center;
  max-width: 60%;
  min-width: 0;
  color: var(--mk-faint);
}

.mk-Panel-status[data-alarm] {
  color: var(--mk-state);
  font-weight: 600;
}

.mk-Panel-icon {
  display: flex;
}

.mk-Panel .mk-Panel-large {
  flex: none;
}

.mk-Panel-news {
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Panel-words p,
.mk-Pane-empty p {
  margin: 8px 0;
}

.mk-Panel-body,
.mk-Pane,
.mk-Pane-mesh {
  display: flex;
  flex-direction: column;
  gap: 8px;
  min-width: 0;
}

.mk-Pane[data-stale] .mk-Pane-mesh > :not(.mk-Pane-view),
.mk-Pane[data-stale] .mk-MeshList {
  opacity: 0.5;
}

.mk-Pane-view .mk-Board {
  padding: 0;
}

.mk-Panel .mk-Button.mk-mod-main {
  border-color: var(--jp-brand-color1);
  background: var(--jp-brand-color1);
  color: var(--jp-ui-inverse-font-color1);
}

.mk-Panel .mk-Button.mk-mod-main:hover:not(:disabled) {
  background: var(--jp-brand-color0);
}

.mk-Panel .mk-Button[aria-disabled] {
  opacity: 0.45;
  cursor: default;
}

/* ---- the meshes of a kernel */

.mk-MeshList {
  display: flex;
  flex-direction: column;
  max-height: 30vh;
  overflow-y: auto;
  border: 1px solid var(--mk-line);
  border-radius: 4px;
}

.mk-Panel .mk-MeshList-item {
  display: grid;
  grid-template: 'icon name marks' auto '. news news' auto / 14px minmax(0, 1fr) auto;
  gap: 0 6px;
  align-items: center;
  padding: 4px 8px;
  border-inline-start: 3px solid transparent;
}

.mk-Panel .mk-MeshList-item + .mk-MeshList-item {
  border-top: 1px solid var(--mk-line);
}

.mk-Panel .mk-MeshList-item:hover {
  background: var(--mk-raised);
}

.mk-Panel .mk-MeshList-item[aria-checked='true'] {
  border-inline-start-color: var(--mk-focus);
  background: var(--mk-raised);
}

.mk-MeshList-icon {
  display: flex;
  grid-area: icon;
}

.mk-MeshList-name {
  grid-area: name;
  overflow: hidden;
  font-weight: 600;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-MeshList-marks {
  grid-area: marks;
  color: var(--mk-faint);
}

.mk-MeshList-news {
  grid-area: news;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-MeshList-item[data-state='dead'] .mk-MeshList-news,
.mk-MeshList-item[data-state='unresponsive'] .mk-MeshList-news,
.mk-MeshList-item[data-state='hang'] .mk-MeshList-news,
.mk-MeshList-item[data-state='walltime'] .mk-MeshList-news {
  color: var(--mk-state);
}

/* ---- jobs */

.mk-Jobs {
  display: flex;
  flex-direction: column;
  gap: 4px;
}

.mk-Jobs-item {
  display: grid;
  grid-template: 'name end' auto 'state state' auto / minmax(0, 1fr) auto;
  gap: 2px 6px;
  align-items: center;
  padding: 4px 0;
}

.mk-Jobs-name {
  overflow: hidden;
  font-weight: 600;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Jobs-state {
  grid-area: state;
  color: var(--mk-faint);
  overflow-wrap: anywhere;
}

.mk-Jobs-item[data-bad] .mk-Jobs-state {
  color: var(--mk-dead);
}

/* ---- buttons of the mesh */

.mk-Bar {
  display: flex;
  flex-direction: column;
  gap: 4px;
}

.mk-Bar-row {
  display: flex;
  flex-wrap: wrap;
  gap: 4px;
}

.mk-Bar > .mk-Bar-row {
  display: grid;
  grid-template-columns: repeat(auto-fit, minmax(70px, 1fr));
}

.mk-Panel .mk-Bar > .mk-Bar-row .mk-Button {
  text-align: center;
}

.mk-Panel .mk-Bar-code {
  font-family: var(--mk-mono);
}

.mk-Panel .mk-Button[data-urgent] {
  border-color: var(--mk-dead);
  color: var(--mk-dead);
  font-weight: 600;
}

.mk-Bar-result {
  display: -webkit-box;
  overflow: hidden;
  -webkit-box-orient: vertical;
  -webkit-line-clamp: 3;
  color: var(--mk-faint);
  overflow-wrap: anywhere;
}

.mk-Bar-result:empty {
  display: none;
}

.mk-Bar-result[data-bad] {
  color: var(--mk-dead);
}

/* ---- sections */

.mk-Section {
  border-top: 1px solid var(--mk-line);
}

.mk-Section + .mk-Section {
  margin-top: -8px;
}

.mk-Panel .mk-Section-head {
  display: flex;
  gap: 6px;
  align-items: center;
  width: 100%;
  min-height: 30px;
}

.mk-Section-head::before {
  width: 0;
  height: 0;
  margin-inline: 3px;
  border-block: 4px solid transparent;
  border-inline-start: 5px solid currentColor;
  content: '';
}

.mk-Section-head[aria-expanded='true']::before {
  transform: rotate(90deg);
}

.mk-Section-title {
  font-weight: 600;
}

.mk-Section-count {
  color: var(--mk-faint);
}

.mk-Section-count[data-alarm] {
  color: var(--mk-dead);
  font-weight: 600;
}

.mk-Section-body {
  display: flex;
  flex-direction: column;
  gap: 6px;
  padding: 0 0 12px;
}

.mk-Section-body > .mk-Log {
  height: 280px;
}

.mk-Panel .mk-Heading {
  margin: 6px 0 2px;
  font-size: inherit;
  font-weight: 600;
}

.mk-Kept .mk-Heading {
  margin: 8px 0 4px;
}

.mk-List {
  margin: 0;
  padding: 0;
  list-style: none;
}

.mk-Pre {
  max-height: 320px;
  margin: 0;
  overflow: auto;
  font-family: var(--mk-mono);
  font-size: 12px;
  white-space: pre-wrap;
  overflow-wrap: anywhere;
}

.mk-Hang-known:not(:empty) {
  padding: 6px 8px;
  border-inline-start: 3px solid var(--mk-unresponsive);
  background: var(--mk-raised);
  overflow-wrap: anywhere;
}

.mk-Section-body .mk-Reading-page {
  display: flex;
  flex-direction: column;
  gap: 6px;
  max-height: 400px;
  overflow: auto;
}

/* ---- stops */

.mk-Stops {
  display: flex;
  flex-direction: column;
  gap: 8px;
}

.mk-Stops-title {
  display: flex;
  gap: 6px;
  align-items: center;
}

.mk-Stops-title > span,
.mk-Stops-text {
  min-width: 0;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Stops-title .mk-Icon {
  color: var(--mk-stopped);
}

.mk-Stops-text {
  padding-inline-start: 20px;
  color: var(--mk-dead);
}

.mk-Stops-ranks {
  display: flex;
  flex-wrap: wrap;
  gap: 4px;
  padding: 4px 0 0 20px;
}

.mk-Panel .mk-Stops-rank {
  min-width: 28px;
  height: 24px;
  padding: 0 6px;
  border: 1px solid var(--mk-line);
  border-radius: 12px;
  text-align: center;
}

.mk-Panel .mk-Stops-rank:hover {
  background: var(--mk-raised);
}

.mk-Panel .mk-Stops-rank[aria-checked='true'] {
  border-color: var(--mk-stopped);
  background: var(--mk-stopped);
  color: var(--mk-on);
}

.mk-Breakpoints-item {
  display: flex;
  gap: 6px;
  align-items: baseline;
  min-height: 24px;
  white-space: nowrap;
}

.mk-Breakpoints-item .mk-Faint {
  min-width: 0;
  overflow: hidden;
  text-overflow: ellipsis;
}

.mk-Breakpoints-dot {
  flex: none;
  width: 8px;
  height: 8px;
  border-radius: 4px;
  background: var(--mk-dead);
}

/* ---- actors */

.mk-Actors-item {
  display: grid;
  grid-template-columns: minmax(0, 1fr) fit-content(60%);
  gap: 0 8px;
  padding: 4px 0;
}

.mk-Actors-item + .mk-Actors-item {
  border-top: 1px solid var(--mk-line);
}

.mk-Actors-item > * {
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Actors-name {
  font-weight: 600;
}

.mk-Actors-runs,
.mk-Actors-failed {
  text-align: end;
}

.mk-Actors-facts {
  color: var(--mk-faint);
}

.mk-Actors-failed {
  color: var(--mk-dead);
}

/* ---- forms */

.mk-Up {
  display: flex;
  flex-direction: column;
  gap: 6px;
  max-width: 420px;
}

.mk-Field {
  display: flex;
  gap: 8px;
  align-items: center;
}

.mk-Field-name {
  flex: 0 0 76px;
}

.mk-Field .mk-Input {
  flex: 1;
}

.mk-Up-help {
  margin-top: -4px;
  padding-inline-start: 84px;
}

.mk-Check {
  display: flex;
  gap: 6px;
  align-items: center;
  min-height: 24px;
}

.mk-Up-buttons {
  display: flex;
  flex-wrap: wrap;
  gap: 6px;
}

.mk-Pane-more {
  align-self: flex-start;
}

/* ---- kept meshes */

.mk-Kept {
  margin-top: 8px;
}

.mk-Kept-item {
  display: grid;
  grid-template-columns: minmax(0, 1fr) auto auto;
  gap: 0 6px;
  align-items: center;
  padding: 4px 0;
}

.mk-Kept-name {
  overflow: hidden;
  font-weight: 600;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Kept-item .mk-Faint {
  grid-row: 2;
  grid-column: 1 / -1;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

/* ---- the status bar */

.mk-Status.mk-View {
  display: flex;
  min-width: 0;
  color: inherit;
  line-height: inherit;
}

.mk-Status.mk-View .mk-Status-button {
  display: flex;
  gap: 4px;
  align-items: center;
  max-width: 420px;
  padding: 0 4px;
}

.mk-Status.mk-View .mk-Status-button:hover {
  background: var(--jp-layout-color3);
}

.mk-Status.mk-View .mk-Status-button:focus-visible {
  outline-offset: -2px;
}

.mk-Status .mk-Status-icon {
  display: flex;
}

.mk-Status .mk-Icon {
  width: 12px;
  height: 12px;
}

.mk-Status .mk-Status-text {
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

/* Two cards beside each other at the width that JupyterLab gives a side bar. */
.mk-Panel .mk-Cards {
  grid-template-columns: repeat(auto-fill, minmax(96px, 1fr));
}

/* ---- a mesh in the main area */

.mk-MainView.mk-View {
  min-width: 220px;
  overflow: auto;
  background: var(--jp-layout-color1);
  color: var(--mk-text);
  container-type: inline-size;
}

.mk-MainView:focus {
  outline: none;
}

.mk-Overview {
  display: grid;
  grid-template-columns: minmax(0, 1fr) minmax(0, 1fr);
  gap: 16px;
  padding: 12px;
}

@container (max-width: 720px) {
  .mk-Overview {
    grid-template-columns: minmax(0, 1fr);
  }
}

.mk-Overview-charts {
  display: flex;
  flex-direction: column;
  gap: 8px;
}

.mk-Overview-form {
  display: flex;
  flex-wrap: wrap;
  gap: 6px;
  align-items: center;
  margin-bottom: 8px;
}

.mk-Overview-form input {
  flex: 1 1 120px;
  min-width: 0;
  font-family: var(--mk-mono);
}

.mk-View .mk-Overview-remove {
  float: inline-end;
}

/* ---- figures of ranks in the output of a cell, side by side */

.jp-OutputArea:has(> .jp-OutputArea-child > .mk-RankFigure) {
  padding-inline-start: var(--jp-cell-prompt-width);
}

.jp-OutputArea:has(> .jp-OutputArea-child > .mk-RankFigure) > .jp-OutputArea-child:not(:has(> .mk-RankFigure)) {
  width: calc(100% + var(--jp-cell-prompt-width));
  margin-inline-start: calc(-1 * var(--jp-cell-prompt-width));
}

.jp-OutputArea > .jp-OutputArea-child:has(> .mk-RankFigure) {
  display: inline-block;
  width: max(50% - 8px, min(100%, 240px));
  margin-inline-end: 4px;
  vertical-align: top;
}

/* One alone has all the room. */
.jp-OutputArea
  > .jp-OutputArea-child:nth-child(1 of :has(> .mk-RankFigure)):nth-last-child(1 of :has(> .mk-RankFigure)) {
  width: 100%;
}

.jp-OutputArea-child:has(> .mk-RankFigure) > .jp-OutputPrompt,
.jp-OutputArea-child:has(+ .jp-OutputArea-child > .mk-RankFigure):has(> * > .mk-OnlyLabels) {
  display: none;
}

.mk-RankFigure-ranks {
  font-family: var(--jp-code-font-family);
  font-size: var(--jp-code-font-size);
  opacity: 0.6;
}

.mk-RankFigure img,
.mk-RankFigure svg {
  max-width: 100%;
  height: auto;
}
`,""]),t.d(a,{},{A:n})},23(e){e.exports=function(e){var a=[];return a.toString=function(){return this.map(function(a){var t="",i=void 0!==a[5];return a[4]&&(t+="@supports (".concat(a[4],") {")),a[2]&&(t+="@media ".concat(a[2]," {")),i&&(t+="@layer".concat(a[5].length>0?" ".concat(a[5]):""," {")),t+=e(a),i&&(t+="}"),a[2]&&(t+="}"),a[4]&&(t+="}"),t}).join("")},a.i=function(e,t,i,o,r){"string"==typeof e&&(e=[[null,e,void 0]]);var n={};if(i)for(var m=0;m<this.length;m++){var l=this[m][0];null!=l&&(n[l]=!0)}for(var d=0;d<e.length;d++){var s=[].concat(e[d]);i&&n[s[0]]||(void 0!==r&&(void 0===s[5]||(s[1]="@layer".concat(s[5].length>0?" ".concat(s[5]):""," {").concat(s[1],"}")),s[5]=r),t&&(s[2]&&(s[1]="@media ".concat(s[2]," {").concat(s[1],"}")),s[2]=t),o&&(s[4]?(s[1]="@supports (".concat(s[4],") {").concat(s[1],"}"),s[4]=o):s[4]="".concat(o)),a.push(s))}},a}},22(e){e.exports=function(e){return e[1]}},14(e,a,t){t.r(a);var i=t(15),o=t.n(i),r=t(16),n=t.n(r),m=t(17),l=t.n(m),d=t(18),s=t.n(d),p=t(19),k=t.n(p),c=t(20),f=t.n(c),h=t(21),x={};x.styleTagTransform=f(),x.setAttributes=s(),x.insert=l().bind(null,"head"),x.domAPI=n(),x.insertStyleElement=k(),o()(h.A,x);let w=h.A&&h.A.locals?h.A.locals:void 0;t.d(a,{},{default:w})},15(e){var a=[];function t(e){for(var t=-1,i=0;i<a.length;i++)if(a[i].identifier===e){t=i;break}return t}function i(e,i){for(var o={},r=[],n=0;n<e.length;n++){var m=e[n],l=i.base?m[0]+i.base:m[0],d=o[l]||0,s="".concat(l," ").concat(d);o[l]=d+1;var p=t(s),k={css:m[1],media:m[2],sourceMap:m[3],supports:m[4],layer:m[5]};if(-1!==p)a[p].references++,a[p].updater(k);else{var c=function(e,a){var t=a.domAPI(a);return t.update(e),function(a){a?(a.css!==e.css||a.media!==e.media||a.sourceMap!==e.sourceMap||a.supports!==e.supports||a.layer!==e.layer)&&t.update(e=a):t.remove()}}(k,i);i.byIndex=n,a.splice(n,0,{identifier:s,updater:c,references:1})}r.push(s)}return r}e.exports=function(e,o){var r=i(e=e||[],o=o||{});return function(e){e=e||[];for(var n=0;n<r.length;n++){var m=t(r[n]);a[m].references--}for(var l=i(e,o),d=0;d<r.length;d++){var s=t(r[d]);0===a[s].references&&(a[s].updater(),a.splice(s,1))}r=l}}},17(e){var a={};e.exports=function(e,t){var i=function(e){if(void 0===a[e]){var t=document.querySelector(e);if(window.HTMLIFrameElement&&t instanceof window.HTMLIFrameElement)try{t=t.contentDocument.head}catch(e){t=null}a[e]=t}return a[e]}(e);if(!i)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");i.appendChild(t)}},19(e){e.exports=function(e){var a=document.createElement("style");return e.setAttributes(a,e.attributes),e.insert(a,e.options),a}},18(e,a,t){e.exports=function(e){var a=t.nc;a&&e.setAttribute("nonce",a)}},16(e){e.exports=function(e){if("u"<typeof document)return{update:function(){},remove:function(){}};var a=e.insertStyleElement(e);return{update:function(t){var i,o,r;i="",t.supports&&(i+="@supports (".concat(t.supports,") {")),t.media&&(i+="@media ".concat(t.media," {")),(o=void 0!==t.layer)&&(i+="@layer".concat(t.layer.length>0?" ".concat(t.layer):""," {")),i+=t.css,o&&(i+="}"),t.media&&(i+="}"),t.supports&&(i+="}"),(r=t.sourceMap)&&"u">typeof btoa&&(i+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(r))))," */")),e.styleTagTransform(i,a,e.options)},remove:function(){var e;null===(e=a).parentNode||e.parentNode.removeChild(e)}}}},20(e){e.exports=function(e,a){if(a.styleSheet)a.styleSheet.cssText=e;else{for(;a.firstChild;)a.removeChild(a.firstChild);a.appendChild(document.createTextNode(e))}}}}]);