/** The model that the widget and the panel share: no DOM, no Jupyter. */

export * from './actions';
export * from './feed';
export * from './logbuffer';
export * from './messages';
export * from './quantities';
export * from './rankset';
export * from './series';
export * from './store';
export * from './summary';
export * from './translation';
export * from './views';
