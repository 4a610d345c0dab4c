// Where the scores of a tile lie.
#pragma once

namespace anyflash {

// `coordinates` leads from a place in a thread's (row, col) view to row and column of the tile at
// (row0, col0).
template <class Coordinates>
struct ScorePlaces {
  Coordinates coordinates;
  int row0;
  int col0;
  bool sees_all;  // each row each key, masks by position apart
};

}  // namespace anyflash
