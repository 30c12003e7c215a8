// The gated delta rule over a block's rows (RecurrentCache.advance): S <- g S, d = beta (v - S k),
// S <- S + d k^T, y = S q. Records d, with which replay is one multiply-add a row.
//
// A simdgroup keeps one row of the state S [Dv, Dk] of one head in registers, its lanes every 32nd
// column. Rows go one by one, so that T rows at once and T times one row give the same bits.

const int lane = int(thread_index_in_simdgroup), rows = queries_shape[1];
const int row = int(thread_position_in_grid.y), head = row / DV, d = row % DV;
const int key_head = head / (HV / HK);

float state[(DK + 31) / 32];
for (int i = lane; i < DK; i += 32) state[i / 32] = START ? start[size_t(row) * DK + i] : 0.0f;
for (int t = 0; t < rows; t++) {
    device const float* key = keys + (size_t(t) * HK + key_head) * DK;
    device const float* query = queries + (size_t(t) * HK + key_head) * DK;
    const float kept = decay[t * HV + head];
    float remembered = 0;
    for (int i = lane; i < DK; i += 32) {
        state[i / 32] *= kept;
        remembered += state[i / 32] * key[i];
    }
    const float change = (values[(size_t(t) * HV + head) * DV + d] - simd_sum(remembered)) * beta[t * HV + head];
    float read = 0;
    for (int i = lane; i < DK; i += 32) {
        state[i / 32] += change * key[i];
        read += state[i / 32] * query[i];
    }
    read = simd_sum(read);
    if (lane == 0) {
        out[(size_t(t) * HV + head) * DV + d] = read;
        changes[(size_t(t) * HV + head) * DV + d] = change;
    }
}
for (int i = lane; i < DK; i += 32) end[size_t(row) * DK + i] = state[i / 32];
