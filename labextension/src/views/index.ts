/** Views of a mesh: DOM and canvas, no Jupyter. `views.css` has their styles. */

export { MeshBoard, type BoardOptions, type ConnectionSource } from './board';
export { LineChart } from './chart';
export { ComparisonGrid, type ComparisonData } from './comparison';
export { RankDetails, refusalView, stackView } from './details';
export { stateIcon } from './glyphs';
export { MeshGrid } from './grid/meshgrid';
export { HostsTable } from './hosts';
export { StateLegend } from './legend';
export { LogView, type LogOptions } from './log';
export { MeshNews } from './news';
export { Theme } from './theme';
export { Tooltip } from './tooltip';
