package stormproof.storm;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.Lock;
import java.util.concurrent.locks.ReentrantLock;

/**
 * What spouts may emit, and what was acknowledged. Components are created by Storm from serialised copies, in this JVM: what
 * they share is static.
 */
final class Work {
  private static final Lock LOCK = new ReentrantLock();
  private static final Condition CHANGED = LOCK.newCondition();
  private static final Queue<Map<String, long[]>> COUNTS = new ConcurrentLinkedQueue<>();

  private static volatile String[] sentences;
  private static volatile long granted;
  private static long acknowledged;
  private static String failure;

  private Work() {}

  static void load(Path file) throws IOException {
    sentences = Files.readAllLines(file).toArray(String[]::new);
  }

  /** How many sentences one run has. */
  static int size() {
    return sentences.length;
  }

  /** The sentence with a running number; every run has the same ones. */
  static String sentence(long number) {
    return sentences[(int) (number % sentences.length)];
  }

  /** How many sentences may have been emitted by now. */
  static long granted() {
    return granted;
  }

  /** A counting task's own map, whose sum over all tasks is the answer. */
  static void share(Map<String, long[]> counts) {
    COUNTS.add(counts);
  }

  /** The maps of all counting tasks; to be read after what they count was acknowledged. */
  static Iterable<Map<String, long[]>> counts() {
    return COUNTS;
  }

  static void acknowledge(long number) {
    LOCK.lock();
    try {
      acknowledged += number;
      CHANGED.signalAll();
    } finally {
      LOCK.unlock();
    }
  }

  static void fail(String reason) {
    LOCK.lock();
    try {
      failure = reason;
      CHANGED.signalAll();
    } finally {
      LOCK.unlock();
    }
  }

  /** Let every sentence be emitted once more; seconds until the last one is acknowledged. */
  static double run(long limitSeconds) throws InterruptedException {
    LOCK.lock();
    try {
      long started = System.nanoTime();
      long left = TimeUnit.SECONDS.toNanos(limitSeconds);
      granted += sentences.length;
      while (acknowledged < granted && failure == null && left > 0) {
        left = CHANGED.awaitNanos(left);
      }
      if (failure != null) {
        throw new IllegalStateException(failure);
      }
      if (acknowledged != granted) {
        throw new IllegalStateException(
            acknowledged + " of " + granted + " sentences are acknowledged after " + limitSeconds + " s");
      }
      return (System.nanoTime() - started) / 1e9;
    } finally {
      LOCK.unlock();
    }
  }
}
