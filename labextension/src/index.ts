import { panelPlugin } from './jupyter/plugin';

export default [panelPlugin];
