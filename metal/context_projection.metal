// Keys and values of all draft layers for newly committed positions, from the fc's output: the second
// of the two launches of DFlashDrafter.observe. One threadgroup makes one head of one layer, since
// the norm of a key needs the whole head; heads 0 .. HEADS - 1 are keys, the rest values.
//
// hidden_norm is folded in: its weights go with the columns, 1 / rms of a row with the row's sums.
// Keys get k_norm and rope (halves of the first 2 * HALF dimensions) at absolute positions.

constexpr int SIMDS = D / (8 * TILES);
threadgroup float head_rows[ROW_TILES * 8][D];
threadgroup float scale_of[ROW_TILES * 8];
const int rows = x_shape[0], columns = x_shape[1];
const int head = int(threadgroup_position_in_grid.x);
const int lane = int(thread_index_in_simdgroup), simd = int(simdgroup_index_in_threadgroup);
const int first = head * D + simd * TILES * 8;

simdgroup_float8x8 sums[ROW_TILES][TILES];
float squares[ROW_TILES];
for (int r = 0; r < ROW_TILES; r++) {
    squares[r] = 0;
    for (int t = 0; t < TILES; t++) sums[r][t] = make_filled_simdgroup_matrix<float, 8>(0.0f);
}
multiply_rows<X, W, S, C, BITS, GROUP, ROW_TILES, TILES, true>(
    x, rows, size_t(columns), weights, scales, biases, first, 2 * HEADS * D, columns, 0, 1, norm,
    uint(lane), sums, squares);

const int row = matrix_row(uint(lane)), column = matrix_column(uint(lane));
for (int r = 0; r < ROW_TILES; r++) {
    const float square = row_sum(squares[r]);
    if (simd == 0 && column == 0) scale_of[8 * r + row] = rsqrt(square / float(columns) + norm_eps);
    for (int t = 0; t < TILES; t++)
        for (int e = 0; e < 2; e++)
            head_rows[8 * r + row][8 * (simd * TILES + t) + column + e] = sums[r][t].thread_elements()[e];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int m = simd; m < rows; m += SIMDS) {
    float sum = 0;
    for (int d = lane; d < D; d += 32) {
        float value = head_rows[m][d] * scale_of[m];
        if (BIAS) value += float(bias[head * D + d]);
        head_rows[m][d] = value;
        sum += value * value;
    }
    if (head >= HEADS) {
        for (int d = lane; d < D; d += 32)
            values[(size_t(head - HEADS) * rows + m) * D + d] = T(head_rows[m][d]);
        continue;
    }
    const float scale = rsqrt(simd_sum(sum) / float(D) + head_eps);
    for (int d = lane; d < D; d += 32)
        head_rows[m][d] *= scale * float(head_norms[head / KV_HEADS * D + d]);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    device T* out = keys + (size_t(head) * rows + m) * D;
    for (int d = lane; d < D; d += 32) {
        float turned = head_rows[m][d];
        if (d < 2 * HALF) {
            const int pair = d % HALF;
            const float turn = THETA ? exp2(-log_theta * float(pair) / float(HALF)) : 1.0f / periods[pair];
            const float angle = float(position + m) * turn;
            const float other = head_rows[m][d < HALF ? d + HALF : d - HALF];
            turned = magnitude * (turned * cos(angle) + (d < HALF ? -other : other) * sin(angle));
        }
        out[d] = T(turned);
    }
}
